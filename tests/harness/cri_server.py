"""An engine's side of the CRI, as far as it says which engine it is and what it was started with.

    with CriServer(path, "1.7.24", cdi=False) as engine:
        ...
        engine.restart("2.1.9", cdi=True)

Source: CRI v1; containerd internal/cri/server/status.go.
"""

from __future__ import annotations

import json
import os
from typing import Any, Self

from api.proto import cri_pb2 as pb
from tests.harness.grpc_server import serve

__all__ = ["CriServer"]


class CriServer:
    """An engine. As a context it runs.

    Args:
        cdi: what it says of ``enable_cdi``; None for nothing, as containerd 1.6.
        annotations: that the handler ``nvidia`` gets.
    """

    def __init__(
        self, path: str, version: str, *, cdi: bool | None, annotations: tuple[str, ...] = ()
    ) -> None:
        self.path = path
        self.asked = 0
        self._annotations = annotations
        self._version, self._cdi = version, cdi
        self._server: Any = None

    def restart(self, version: str, *, cdi: bool | None) -> None:
        """Be another one, on the same socket, which is made anew."""
        self.__exit__(None, None, None)
        self._version, self._cdi = version, cdi
        self.__enter__()

    def _say_version(self, *_: object) -> pb.VersionResponse:
        self.asked += 1
        return pb.VersionResponse(runtime_name="containerd", runtime_version=self._version)

    def _say_status(self, *_: object) -> pb.StatusResponse:
        handler = {
            "runtimeType": "io.containerd.nvidia.v1",
            "ContainerAnnotations": list(self._annotations) or None,
        }
        config: dict[str, Any] = {"containerd": {"runtimes": {"nvidia": handler}}}
        if self._cdi is not None:
            config["enableCDI"] = self._cdi
        return pb.StatusResponse(info={"config": json.dumps(config)})

    def __enter__(self) -> Self:
        methods = {
            "Version": (self._say_version, pb.VersionRequest),
            "Status": (self._say_status, pb.StatusRequest),
        }
        if os.path.lexists(self.path):
            os.unlink(self.path)
        self._server = serve(self.path, "runtime.v1.RuntimeService", methods)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()
