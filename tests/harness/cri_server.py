"""The part of an engine's CRI that reports its version and its configuration.

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
    """An engine. It runs while the context is open.

    Args:
        cdi: the value of ``enable_cdi``; None to report none, as containerd 1.6.
        annotations: the annotations that the handler ``nvidia`` accepts.

    Attributes:
        pods: the labels of its pods, by their UIDs.
    """

    def __init__(
        self, path: str, version: str, *, cdi: bool | None, annotations: tuple[str, ...] = ()
    ) -> None:
        self.path = path
        self.asked = 0
        self.pods: dict[str, dict[str, str]] = {}
        self._annotations = annotations
        self._version, self._cdi = version, cdi
        self._server: Any = None

    def restart(self, version: str, *, cdi: bool | None) -> None:
        """Restart as another version, with a new socket at the same path."""
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

    def _list(self, *_: object) -> pb.ListPodSandboxResponse:
        self.asked += 1
        return pb.ListPodSandboxResponse(
            items=[
                pb.PodSandbox(metadata=pb.PodSandboxMetadata(uid=uid), labels=labels)
                for uid, labels in self.pods.items()
            ]
        )

    def __enter__(self) -> Self:
        methods = {
            "Version": (self._say_version, pb.VersionRequest),
            "Status": (self._say_status, pb.StatusRequest),
            "ListPodSandbox": (self._list, pb.ListPodSandboxRequest),
        }
        if os.path.lexists(self.path):
            os.unlink(self.path)
        self._server = serve(self.path, "runtime.v1.RuntimeService", methods)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()
