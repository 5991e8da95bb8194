"""The engine of this node, as it says of itself: asked when it is another than the last time.

Rules
- It is asked on the socket on which it serves the kubelet, and not looked up in files, which it may
  not have read yet (:mod:`integration.cri.engine`).
- An engine that is started makes its socket anew, so what it has said holds as long as the sockets
  are the same ones. One that does not answer is asked again each time somebody needs to know.

Source: CRI v1 Version, Status.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import anyio
import grpc  # type: ignore[import-untyped] # it ships no types
import grpc.aio  # type: ignore[import-untyped] # likewise

from api.proto import cri_pb2 as pb
from integration.cri.engine import Engine, engine_of
from integration.node.calls import answer_of
from integration.node.plugin.sockets import socket_identity

if TYPE_CHECKING:
    from collections.abc import Sequence

_TIMEOUT: Final = 2.0
_LONGEST: Final = 16 << 20
_OPTIONS: Final = (
    ("grpc.default_authority", "localhost"),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", _LONGEST),
)


class EngineAsked:
    """What the engine has said.

    Args:
        sockets: where one may serve the kubelet; the first that answers is meant.
    """

    def __init__(self, sockets: Sequence[str]) -> None:
        self._sockets = tuple(sockets)
        self._asked_of: tuple[object, ...] | None = None
        self._engine: Engine | None = None
        self._asking = anyio.Lock()

    async def ask(self) -> Engine | None:
        """What it says now; None if none answers."""
        async with self._asking:
            sockets = tuple(map(socket_identity, self._sockets))
            if self._engine is None or sockets != self._asked_of:
                self._engine, self._asked_of = None, sockets
                for path, there in zip(self._sockets, sockets, strict=True):
                    if there is not None and self._engine is None:
                        self._engine = await _ask(path)
            return self._engine


async def _ask(path: str) -> Engine | None:
    async with grpc.aio.insecure_channel(f"unix:{path}", options=_OPTIONS) as channel:

        async def call(method: str, request: Any, answer: Any) -> Any:
            ask = channel.unary_unary(
                f"/runtime.v1.RuntimeService/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=answer.FromString,
            )
            return await answer_of(ask(request, timeout=_TIMEOUT))

        try:
            version = await call("Version", pb.VersionRequest(), pb.VersionResponse)
            status = await call("Status", pb.StatusRequest(verbose=True), pb.StatusResponse)
        except grpc.RpcError:
            return None
    return engine_of(version, status)
