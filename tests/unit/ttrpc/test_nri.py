"""Two connections on one socket, as a runtime and its plugin have them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import nri
from api.errors import Status
from api.nri import PLUGIN, RUNTIME, Connection, FrameReader, encode
from api.proto import nri_pb2 as pb
from api.proto import ttrpc_pb2
from api.ttrpc import (
    ConnectionClosed,
    Context,
    RemoteError,
    RemoteProtocolError,
    Service,
    frames,
    transport,
)
from api.ttrpc.service import Credentials
from tests.harness.raising import raises

pytestmark = pytest.mark.anyio

SELF = Credentials(os.getpid(), os.geteuid(), os.getegid())
SERVICES = pb.DESCRIPTOR.services_by_name
PLUGIN_SERVICE = SERVICES["Plugin"].full_name
RUNTIME_SERVICE = SERVICES["Runtime"].full_name

messages = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 9000).map(lambda size: bytes([size % 251]) * size)),
    max_size=5,
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def cut(stream: bytes, at: list[int]) -> list[bytes]:
    ends = sorted(at)
    return [stream[a:b] for a, b in zip([0, *ends], [*ends, len(stream)], strict=True)]


@given(messages, st.data())
def test_any_cut_of_the_stream_reads_the_same(
    sent: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(encode(*each) for each in sent)
    places = st.lists(st.integers(0, len(stream)), max_size=12)
    reader = FrameReader()
    found: dict[int, bytes] = defaultdict(bytes)
    wanted: dict[int, bytes] = defaultdict(bytes)
    for piece in cut(stream, data.draw(places)):
        for connection, part in reader.feed(piece):
            found[connection] += part
    for connection, message in sent:
        wanted[connection] += message
    assert {k: v for k, v in found.items() if v} == {k: v for k, v in wanted.items() if v}


@given(st.binary(max_size=40).map(lambda x: x * 300))
def test_a_message_fits_what_a_runtime_reads_with(message: bytes) -> None:
    """It reads whole frames: first up to 4096 bytes, then exactly the rest."""
    stream, sizes = encode(PLUGIN, message), []
    while stream:
        sizes.append(int.from_bytes(stream[4:8], "big"))
        stream = stream[8 + sizes[-1] :]
    assert sum(sizes) == len(message)
    assert len(sizes) <= 2
    assert all(size <= 4096 for size in sizes[:1])


def test_frames_are_written_and_read_as_the_runtime_has_them() -> None:
    wire = bytes.fromhex("00000002 00000003 616263 00000001 00000000")
    assert encode(RUNTIME, b"abc") == wire[:11]
    assert FrameReader().feed(wire) == [(2, b"abc")]
    with raises(RemoteProtocolError):
        FrameReader().feed(bytes.fromhex("00000001 0040000b"))
    assert FrameReader().feed(bytes.fromhex("00000001 0040000a 61")) == [(1, b"a")]


async def register(_: Context, request: pb.RegisterPluginRequest) -> pb.Empty:
    assert request.plugin_idx == "07"
    return pb.Empty()


async def echo(_: Context, request: pb.CreateContainerRequest) -> pb.CreateContainerResponse:
    env = [pb.KeyValue(key="size", value=str(len(request.container.env[0])))]
    mounts = [pb.Mount(destination=request.container.env[0])]
    return pb.CreateContainerResponse(adjust=pb.ContainerAdjustment(env=env, mounts=mounts))


@contextlib.asynccontextmanager
async def connected(**handlers: Any) -> AsyncIterator[tuple[Connection, Connection]]:
    """Connect a plugin's end and a runtime's."""
    ours, theirs = socket.socketpair()
    async with anyio.create_task_group() as tasks:

        def end(sock: socket.socket, name: str, serves: int, **methods: Any) -> Connection:
            service = Service(SERVICES[name], methods)
            one = Connection(sock, SELF, service, lambda *_: None, tasks, serves=serves)
            tasks.start_soon(one.run)
            return one

        plugin = end(ours, "Plugin", PLUGIN, **({"CreateContainer": echo} | handlers))
        yield plugin, end(theirs, "Runtime", RUNTIME, RegisterPlugin=register)
        tasks.cancel_scope.cancel()


async def called(plugin: Connection) -> pb.Empty:
    request = pb.RegisterPluginRequest(plugin_name="nvshim", plugin_idx="07")
    return await plugin.client.call(RUNTIME_SERVICE, "RegisterPlugin", request, pb.Empty, timeout=5)


async def creates(runtime: Connection, size: int) -> pb.CreateContainerResponse:
    request = pb.CreateContainerRequest(container=pb.Container(env=["x" * size]))
    return await runtime.client.call(
        PLUGIN_SERVICE, "CreateContainer", request, pb.CreateContainerResponse, timeout=5
    )


async def test_both_ends_call_each_other_with_messages_of_any_size() -> None:
    async with connected() as (plugin, runtime), anyio.create_task_group() as tasks:
        tasks.start_soon(called, plugin)
        for size in (0, 4000, 4096, 5000, 2_000_000):
            answer = await creates(runtime, size)
            assert answer.adjust.env[0].value == str(size)
            assert len(answer.adjust.mounts[0].destination) == size


async def test_a_call_is_answered_while_another_waits() -> None:
    async def configure(_: Context, __: pb.ConfigureRequest) -> pb.ConfigureResponse:
        return pb.ConfigureResponse(events=8)

    answered = anyio.Event()

    async def wait(_: Context, __: pb.SynchronizeRequest) -> pb.SynchronizeResponse:
        await answered.wait()
        return pb.SynchronizeResponse()

    handlers: dict[str, Callable[..., Any]] = {"Configure": configure, "Synchronize": wait}
    async with connected(**handlers) as (_, runtime), anyio.create_task_group() as tasks:
        call = runtime.client.call
        arguments = (PLUGIN_SERVICE, "Synchronize", pb.SynchronizeRequest(), pb.SynchronizeResponse)
        tasks.start_soon(call, *arguments)
        configured = await call(
            PLUGIN_SERVICE, "Configure", pb.ConfigureRequest(), pb.ConfigureResponse
        )
        assert configured.events == 8
        answered.set()


async def test_an_unknown_method_is_unimplemented_and_the_connection_goes_on() -> None:
    async with connected() as (_, runtime):
        with pytest.raises(RemoteError) as refused:
            await runtime.client.call(PLUGIN_SERVICE, "PostStartContainer", pb.Empty(), pb.Empty)
        assert refused.value.status == Status.UNIMPLEMENTED == 12
        assert (await creates(runtime, 3)).adjust.env[0].value == "3"


async def test_the_end_of_the_runtime_ends_the_calls() -> None:
    async with connected() as (plugin, runtime):
        runtime.client.close()
        await plugin.client.wait_closed()
        with raises(ConnectionClosed):
            await called(plugin)


async def test_frames_of_unknown_connections_are_dropped_and_too_long_ones_end_it() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        async with anyio.create_task_group() as tasks:
            service = Service(SERVICES["Plugin"], {})
            plugin = Connection(ours, SELF, service, lambda *_: None, tasks)
            theirs.send(encode(0, b"x") + encode(77, b"y" * 5000))
            theirs.send((PLUGIN).to_bytes(4, "big") + b"\xff" * 4)
            with anyio.fail_after(5), raises(RemoteProtocolError):
                await plugin.run()
            await plugin.client.wait_closed()
            tasks.cancel_scope.cancel()
    assert nri._LONGEST == frames.DATA_MAX + 10


async def test_a_runtime_that_reads_no_answers_and_goes_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "_ROOM", 1 << 12)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    request = ttrpc_pb2.Request(service=PLUGIN_SERVICE, method="None").SerializeToString()
    async with anyio.create_task_group() as tasks:
        plugin = Connection(ours, SELF, Service(SERVICES["Plugin"], {}), lambda *_: None, tasks)
        tasks.start_soon(plugin.run)
        with theirs:
            left, stream_id, stuck = b"", 1, 0
            while stuck < 100:  # until all buffers are full
                if not left:
                    left = encode(PLUGIN, frames.encode(stream_id, frames.REQUEST, 0, request))
                    stream_id += 2
                try:
                    left, stuck = left[theirs.send(left) :], 0
                except BlockingIOError:
                    stuck += 1
                    await anyio.lowlevel.checkpoint()
        with anyio.fail_after(5):
            await plugin.client.wait_closed()
