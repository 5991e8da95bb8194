"""A test service, and its servers on real unix sockets."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.wrappers_pb2 import StringValue

from api.proto import ttrpc_pb2
from api.ttrpc import Context, Handler, ImmediateHandler, Service
from api.ttrpc.client import connect
from api.ttrpc.frames import REQUEST, RESPONSE, Frame, FrameReader, encode
from api.ttrpc.server import Server
from api.ttrpc.service import Translate
from shim.pod import ttrpc
from tests.harness import loop_backend
from tests.unit.ttrpc.calls import DESCRIPTOR, NAME, Caller


@pytest.fixture(params=["asyncio", loop_backend.OURS])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run on asyncio and on the shim's loop."""
    loop_backend.register()
    return str(request.param)


@pytest.fixture
def server_class(anyio_backend: str) -> type[Server | ttrpc.Server]:
    """Return the server for the loop; both servers have to behave the same."""
    return Server if anyio_backend == "asyncio" else ttrpc.Server


@pytest.fixture
def descriptor() -> ServiceDescriptor:
    """Build a service with a method of every kind; all messages are StringValue."""
    return DESCRIPTOR


@pytest.fixture
def service() -> str:
    return NAME


class Raw:
    """A client connection that sends any bytes a test wants."""

    def __init__(self, stream: anyio.abc.SocketStream) -> None:
        self._stream = stream
        self._reader = FrameReader()
        self.send = stream.send

    async def request(self, stream_id: int, method: str, text: str = "", **fields: Any) -> None:
        """Send a unary request."""
        payload = StringValue(value=text).SerializeToString()
        fields = {"service": NAME, "method": method, "payload": payload} | fields
        message = ttrpc_pb2.Request(**fields)
        await self.send(encode(stream_id, REQUEST, 0, message.SerializeToString()))

    async def answers(self, number: int) -> dict[int, ttrpc_pb2.Response]:
        """Read this many responses; return them by stream."""
        answers: dict[int, ttrpc_pb2.Response] = {}
        with anyio.fail_after(5):
            while len(answers) < number:
                for frame in self._reader.feed(await self._stream.receive(1 << 20)):
                    assert isinstance(frame, Frame)
                    assert frame.type == RESPONSE
                    answers[frame.stream_id] = ttrpc_pb2.Response.FromString(frame.data)
        return answers


class Served:
    """A running server: its path, what it logged, and itself.

    ``calls`` counts the requests whose handlers have started: ``wait_all_tasks_blocked`` does not
    wait for bytes in flight in a socket.
    """

    def __init__(self, path: str, server: Any, log: list[tuple[str, Mapping[str, Any]]]) -> None:
        self.path = path
        self.server = server
        self.log = log
        self.returned = anyio.Event()
        self.calls = 0

    async def until_calls(self, number: int) -> None:
        """Wait until this many handlers have started."""
        await _until(lambda: self.calls >= number)

    @contextlib.asynccontextmanager
    async def raw(self) -> AsyncIterator[Raw]:
        """Open a connection without a client, to send any bytes."""
        async with await anyio.connect_unix(self.path) as stream:
            yield Raw(stream)


async def _until(holds: Callable[[], object]) -> None:
    with anyio.fail_after(5):
        while not holds():  # noqa: ASYNC110 - what is waited for is often outside the process
            await anyio.sleep(0.001)


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Wait until a condition holds, with a timeout."""
    return _until


@pytest.fixture
def serve(tmp_path: Path, descriptor: ServiceDescriptor, server_class: Any) -> Callable[..., Any]:
    """Serve the echo service with some handlers inside the block."""

    @contextlib.asynccontextmanager
    async def serving(
        handlers: Mapping[str, Handler],
        *,
        immediate: Mapping[str, ImmediateHandler] | None = None,
        shared: Sequence[str] = (),
        vital: Sequence[str] = (),
        shielded: Sequence[str] = (),
        translate: Translate | None = None,
        **options: Any,
    ) -> AsyncIterator[Served]:
        path = str(tmp_path / "s")
        log: list[tuple[str, Mapping[str, Any]]] = []

        def counted(handler: Handler) -> Handler:
            async def handle(context: Context, request: Any) -> Any:
                served.calls += 1
                return await handler(context, request)

            return handle

        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            counting = {name: counted(handler) for name, handler in handlers.items()}
            echo = Service(
                descriptor,
                counting,
                immediate=immediate,
                shared=shared,
                vital=vital,
                shielded=shielded,
                translate=translate,
            )
            server = server_class(
                [echo],
                **{"log": lambda event, fields: log.append((event, fields)), **options},
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
                # The test should see the exception of its own block.
                if len(group.exceptions) == 1:
                    raise group.exceptions[0] from None
                raise

    return serving


@pytest.fixture
def calling(serve: Any) -> Callable[..., Any]:
    """Serve the echo service with some handlers; yield its client and server."""

    @contextlib.asynccontextmanager
    async def called(handlers: Mapping[str, Handler], **options: Any) -> AsyncIterator[Caller]:
        async with serve(handlers, **options) as served, connect(served.path) as client:
            yield Caller(client, served)

    return called
