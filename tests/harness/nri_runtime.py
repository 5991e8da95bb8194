"""A runtime that serves NRI, as a container engine does, for a plugin under test."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import anyio.abc
from google.protobuf.message import Message

from api.nri import RUNTIME, Connection
from api.proto import nri_pb2 as pb
from api.ttrpc import Context, Service
from api.ttrpc.service import Credentials

__all__ = ["NriRuntime"]

_SERVICES: Final = pb.DESCRIPTOR.services_by_name
_SELF: Final = Credentials(os.getpid(), os.geteuid(), os.getegid())


class NriRuntime:
    """A runtime that listens on a socket. A plugin's connection is a context manager.

    Args:
        path: the socket's path. A file that exists there is replaced.
    """

    def __init__(self, path: str) -> None:
        self.registered: pb.RegisterPluginRequest | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        if os.path.exists(path):
            os.unlink(path)
        self._listener.bind(path)
        self._listener.listen()
        self._connection: Connection | None = None

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Accept the plugin, and register it; at the end the connection is closed."""
        with anyio.fail_after(60):
            await anyio.wait_readable(self._listener)
        sock, _ = self._listener.accept()
        registered = anyio.Event()

        async def register(_: Context, request: pb.RegisterPluginRequest) -> pb.Empty:
            self.registered = request
            registered.set()
            return pb.Empty()

        async with anyio.create_task_group() as tasks:
            service = Service(_SERVICES["Runtime"], {"RegisterPlugin": register})
            self._connection = Connection(
                sock, _SELF, service, lambda *_: None, tasks, serves=RUNTIME
            )
            tasks.start_soon(self._connection.run)
            with anyio.fail_after(60):
                await registered.wait()
            yield
            self._connection.client.close()
            tasks.cancel_scope.cancel()
        sock.close()

    async def call(self, method: str, request: Message, answer: type[Any] = pb.Empty) -> Any:
        """Call the plugin, and return its answer."""
        assert self._connection is not None
        return await self._connection.client.call(
            _SERVICES["Plugin"].full_name, method, request, answer, timeout=2
        )

    async def synchronize(self, *parts: tuple[str, ...]) -> pb.ConfigureResponse:
        """Configure the plugin, and tell it the ids of the containers, in parts."""
        configured: pb.ConfigureResponse = await self.call(
            "Configure", pb.ConfigureRequest(runtime_name="containerd"), pb.ConfigureResponse
        )
        for number, ids in enumerate(parts, 1):
            request = pb.SynchronizeRequest(
                containers=[pb.Container(id=each) for each in ids], more=number < len(parts)
            )
            answer = await self.call("Synchronize", request, pb.SynchronizeResponse)
            assert answer.more == request.more
        return configured

    def close(self) -> None:
        """Stop it; its socket file stays, as after a SIGKILL."""
        self._listener.close()
