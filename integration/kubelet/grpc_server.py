"""A gRPC server at its own unix socket, in the agent's event loop.

The socket is created under a temporary name and moved into place
(:mod:`integration.kubelet.sockets`), so that a kubelet which watches the directory sees it only
once the server listens.

Source: grpc.aio; unix(7).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from typing import Any, Final

import anyio
import anyio.lowlevel
import grpc  # type: ignore[import-untyped] # it ships no types
import grpc.aio  # type: ignore[import-untyped] # the same

from integration.agent_errors import PluginSocketUnusable
from integration.kubelet import sockets
from integration.kubelet.sockets import Identity

CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
"""gRPC's own values by the numbers of :class:`api.errors.Status`."""

# Seconds that running calls have when the server stops.
_TO_END: Final = 1.0


class SocketServer:
    """A server at one socket.

    Args:
        path: the path of the socket.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.identity: Identity | None = None
        """The identity of our socket; None before it exists."""
        self._server: Any = None

    async def listen(self, services: Mapping[str, Mapping[str, Any]]) -> None:
        """Start to serve.

        Args:
            services: the handlers of each service by method, by the service's full name.

        Raises:
            OtherPlugin: another program serves the socket.
            PluginSocketUnusable: the socket cannot be created.
        """
        sockets.refuse_served(self.path)
        temporary = sockets.temporary_path(self.path)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(
            tuple(
                grpc.method_handlers_generic_handler(name, dict(methods))
                for name, methods in services.items()
            )
        )
        try:
            server.add_insecure_port(f"unix:{temporary}")
            with anyio.CancelScope(shield=True):  # gRPC breaks if it is cancelled there
                await server.start()
            await anyio.lowlevel.checkpoint()
            self.identity = sockets.put_in_place(temporary, self.path)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await server.stop(0)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            if isinstance(error, RuntimeError):  # how gRPC reports an error of bind(2)
                raise PluginSocketUnusable(
                    f"the socket {self.path}", found=str(error), do="check who may write there"
                ) from error
            raise
        self._server = server

    async def crash(self) -> None:
        """Wait until the server ends without :meth:`end`."""
        # Cancelling that call would cancel every other wait for the server's end.
        await asyncio.shield(asyncio.ensure_future(self._server.wait_for_termination()))

    def withdraw(self) -> None:
        """Remove the socket. Safe to repeat."""
        if self.identity is not None:
            sockets.remove(self.path, self.identity)

    async def end(self, to_end: float = _TO_END) -> None:
        """Remove the socket, and stop as soon as running calls have ended.

        Args:
            to_end: seconds that running calls may take.
        """
        self.withdraw()
        server, self._server = self._server, None
        if server is not None:
            with anyio.CancelScope(shield=True):
                await server.stop(to_end)

    @property
    def is_in_place(self) -> bool:
        """Whether the socket's path leads to this server."""
        return self.identity is not None and sockets.identity_of(self.path) == self.identity


def serialize(message: Any) -> bytes:
    """Serialize a protobuf message."""
    data: bytes = message.SerializeToString()
    return data
