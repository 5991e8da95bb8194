"""A service to test with, and servers of it on real unix sockets."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, wrappers_pb2

from api.ttrpc import Method, Server, Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from google.protobuf.descriptor import ServiceDescriptor

    from api.ttrpc import Handler

NAME = "nvshim.test.Echo"

# name: (client streams, server streams)
METHODS = {
    "Say": (False, False),
    "Other": (False, False),
    "Collect": (True, False),
    "Count": (False, True),
    "Chat": (True, True),
}


def _describe() -> ServiceDescriptor:
    package, _, name = NAME.rpartition(".")
    file = descriptor_pb2.FileDescriptorProto(
        name="nvshim/test/echo.proto",
        package=package,
        syntax="proto3",
        dependency=[wrappers_pb2.DESCRIPTOR.name],
    )
    service = file.service.add(name=name)
    for method, (client, server) in METHODS.items():
        service.method.add(
            name=method,
            input_type=".google.protobuf.StringValue",
            output_type=".google.protobuf.StringValue",
            client_streaming=client,
            server_streaming=server,
        )
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindServiceByName(NAME)


_DESCRIPTOR = _describe()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def descriptor() -> ServiceDescriptor:
    """A service with a method of every kind; all messages are StringValue."""
    return _DESCRIPTOR


@pytest.fixture
def methods() -> dict[str, Method]:
    return {name: Method.of(_DESCRIPTOR.methods_by_name[name]) for name in METHODS}


@pytest.fixture
def service() -> str:
    return NAME


class Served:
    """A running server: its path, what it logged, and itself."""

    def __init__(self, path: str, server: Server, log: list[tuple[str, Mapping[str, Any]]]) -> None:
        self.path = path
        self.server = server
        self.log = log
        self.returned = anyio.Event()

    @contextlib.asynccontextmanager
    async def raw(self) -> AsyncIterator[anyio.abc.SocketStream]:
        """A connection without a client, for bytes of one's own."""
        async with await anyio.connect_unix(self.path) as stream:
            yield stream


Serve = "Callable[..., AbstractAsyncContextManager[Served]]"


@pytest.fixture
def serve(tmp_path: Path, descriptor: ServiceDescriptor) -> Serve:
    """Serve the echo service with some handlers, for as long as a block lasts."""

    @contextlib.asynccontextmanager
    async def serving(handlers: Mapping[str, Handler], **options: Any) -> AsyncIterator[Served]:
        path = str(tmp_path / "s")
        log: list[tuple[str, Mapping[str, Any]]] = []
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            server = Server(
                [Service(descriptor, handlers)],
                log=lambda event, fields: log.append((event, fields)),
                **options,
            )
            served = Served(path, server, log)

            async def run() -> None:
                await server.serve(listener)
                served.returned.set()

            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(run)
                    yield served
                    await server.shutdown(0)
            except BaseExceptionGroup as group:
                # What a test's block raised is what the test should see.
                if len(group.exceptions) == 1:
                    raise group.exceptions[0] from None
                raise

    return serving
