"""The client on a real socket: lost connections, cancellation and timeouts."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from api.errors import NvshimError, Status
from api.proto import ttrpc_pb2
from api.ttrpc import (
    ConnectFailed,
    ConnectionClosed,
    Context,
    DeadlineExceeded,
    MessageTooLarge,
    RemoteError,
    RemoteProtocolError,
    TtrpcError,
    UndecodableMessage,
)
from api.ttrpc.client import Client, connect, dial
from api.ttrpc.frames import DATA, DATA_MAX, REQUEST, RESPONSE, FrameReader, encode
from shim.pod import ttrpc
from tests.harness.raising import Kind, is_error, raises
from tests.unit.ttrpc.calls import Caller, echo

pytestmark = pytest.mark.anyio


on_anyio = pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
"""Marks tests with the caller's own task group, which the shim's client does not support."""


async def _say(client: Any, text: str = "hi", **options: Any) -> str:
    return await Caller(client).say(text, **options)


@contextlib.asynccontextmanager
async def _pair(loop: str) -> AsyncIterator[tuple[Any, anyio.abc.SocketStream]]:
    """Connect a client to a bare socket instead of a server."""
    ours, theirs = socket.socketpair()
    async with (
        anyio.create_task_group() as tasks,
        await anyio.abc.UNIXSocketStream.from_socket(theirs) as peer,
    ):
        client = Client(ours, tasks) if loop == "asyncio" else ttrpc.Client(ours)
        yield client, peer
        client.close()


@pytest.fixture
def pair(anyio_backend: str) -> Any:
    return lambda: _pair(anyio_backend)


@pytest.fixture
def connected(anyio_backend: str) -> Any:
    """Open the client for the loop, as a context."""

    @contextlib.asynccontextmanager
    async def shims(path: str) -> AsyncIterator[Any]:
        with await ttrpc.Client.connect(path) as client:
            yield client

    return connect if anyio_backend == "asyncio" else shims


@contextlib.asynccontextmanager
async def _asked(
    pair: Any, error: Kind[NvshimError] | None = None, match: str = ""
) -> AsyncIterator[tuple[Any, anyio.abc.SocketStream]]:
    """Send one call from a client to a bare socket, which has read it.

    By the end of the block the call has its answer, "in time", or fails with the given error.
    """
    async with pair() as (client, peer), anyio.create_task_group() as tasks:

        async def ask() -> None:
            if error is None:
                assert await _say(client) == "in time"
            else:
                with raises(error, match=match or None):
                    await _say(client)

        tasks.start_soon(ask)
        await peer.receive()
        yield client, peer


def _response(stream_id: int, text: str = "", **fields: Any) -> bytes:
    fields = {"payload": StringValue(value=text).SerializeToString()} | fields
    return encode(stream_id, RESPONSE, 0, ttrpc_pb2.Response(**fields).SerializeToString())


@on_anyio
async def test_a_client_lives_in_a_task_group_of_ones_own(serve: Any) -> None:
    async with serve({"Say": echo}) as served, anyio.create_task_group() as tasks:
        client = Client(await dial(served.path), tasks)
        assert await _say(client) == "hi"
        assert not client.closed
        client.close()
        assert client.closed


async def test_nobody_listening_is_a_typed_error(tmp_path: Path, connected: Any) -> None:
    with raises(ConnectFailed, match="ENOENT"):
        async with connected(str(tmp_path / "missing")):
            pass
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead"))
    with raises(ConnectFailed, match="ECONNREFUSED"):
        async with connected(str(tmp_path / "dead")):
            pass
    with raises(ConnectFailed, match="too long"):
        async with connected("/" + "x" * 200):
            pass


@on_anyio
async def test_a_full_backlog_is_waited_for(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as waiting:
        listener.bind(path)
        listener.listen(0)
        waiting.enter_context(contextlib.closing(await dial(path)))
        with raises(ConnectFailed, match="backlog"):
            await dial(path, timeout=0.03)
        async with anyio.create_task_group() as tasks:

            async def connect_in_the_end() -> None:
                waiting.enter_context(contextlib.closing(await dial(path, timeout=5)))

            tasks.start_soon(connect_in_the_end)
            await anyio.sleep(0.03)
            listener.accept()[0].close()


@on_anyio
async def test_what_a_block_raises_comes_out_as_it_is(serve: Any) -> None:
    async with serve({"Say": echo}) as served:
        with pytest.raises(KeyError):
            async with connect(served.path):
                raise KeyError
        with pytest.raises(RemoteError):
            async with connect(served.path) as client:
                await client.call("a", "b", StringValue(), StringValue)
        with anyio.move_on_after(0.01) as scope:
            async with connect(served.path):
                await anyio.sleep_forever()
        assert scope.cancelled_caught


async def test_all_calls_fail_at_once_when_the_connection_is_lost(pair: Any, until: Any) -> None:
    failed: list[str] = []
    async with pair() as (client, peer), anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(ConnectionClosed, match="the server closed it"):
                await _say(client)
            failed.append("once")

        for _ in range(10):
            tasks.start_soon(ask)
        await peer.receive()
        await peer.aclose()
        with anyio.fail_after(20):
            await until(lambda: client.closed)
    assert failed == ["once"] * 10
    assert client.closed


async def test_an_answer_before_the_loss_counts(pair: Any) -> None:
    async with _asked(pair) as (_, peer):
        await peer.send(_response(1, "in time"))
        await peer.aclose()


async def test_a_call_after_the_loss_fails_without_waiting(pair: Any, until: Any) -> None:
    async with pair() as (client, peer):
        await peer.aclose()
        await until(lambda: client.closed)
        with anyio.fail_after(20), pytest.raises(ConnectionClosed, match="Connect again"):
            await _say(client)


async def test_closing_it_ourselves_fails_the_calls_too(pair: Any) -> None:
    async with _asked(pair, ConnectionClosed, "closed on this side") as (client, _):
        client.close()
        client.close()


@on_anyio
async def test_a_closed_connections_number_is_not_used_again_while_a_task_waits_for_it() -> None:
    ours, theirs = socket.socketpair()
    number = ours.fileno()
    with theirs:
        async with anyio.create_task_group() as tasks:
            client = Client(ours, tasks)
            await anyio.wait_all_tasks_blocked()
            client.close()
            assert theirs.recv(1) == b""
            # The loop would mistake a new socket with that number for the old one.
            one, other = socket.socketpair()
            with one, other:
                assert number not in {one.fileno(), other.fileno()}
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)


@on_anyio
async def test_cancelling_the_task_group_closes_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        async with anyio.create_task_group() as tasks:
            client = Client(ours, tasks)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        assert client.closed
        assert theirs.recv(1) == b""


async def test_a_cancelled_call_leaves_the_connection_healthy(serve: Any, connected: Any) -> None:
    release = anyio.Event()

    async def wait(_: Context, request: StringValue) -> StringValue:
        if request.value == "slow":
            await release.wait()
        return request

    async with serve({"Say": wait}) as served, connected(served.path) as client:
        with anyio.move_on_after(0.02) as scope:
            await _say(client, "slow")
        assert scope.cancelled_caught
        # Its answer arrives late, and must not be mistaken for another one.
        release.set()
        for number in range(5):
            assert await _say(client, str(number)) == str(number)


async def test_a_timeout_is_over_here_although_the_server_says_nothing(pair: Any) -> None:
    async with pair() as (client, peer):
        with raises(DeadlineExceeded, match=r"0\.02 s") as caught:
            await _say(client, timeout=0.02)
        assert caught.value.status == Status.DEADLINE_EXCEEDED
        (frame,) = FrameReader().feed(await peer.receive())
        assert ttrpc_pb2.Request.FromString(frame.data).timeout_nano == 20_000_000  # type: ignore[union-attr]  # a small frame


@pytest.mark.parametrize(
    ("timeout", "nanoseconds"), [(None, 0), (1.5, 1_500_000_000), (1e-12, 1), (1e300, 9 * 10**18)]
)
async def test_a_timeout_goes_on_the_wire_in_nanoseconds(
    timeout: float | None, nanoseconds: int, pair: Any
) -> None:
    async with pair() as (client, peer):
        # Cancelled by the test, or by the shortest of these timeouts.
        with anyio.move_on_after(0.01):
            try:
                await _say(client, timeout=timeout)
            except TtrpcError as error:
                assert is_error(error, DeadlineExceeded)  # noqa: PT017 - or it is cancelled
        with anyio.move_on_after(1):
            (frame,) = FrameReader().feed(await peer.receive())
            assert ttrpc_pb2.Request.FromString(frame.data).timeout_nano == nanoseconds  # type: ignore[union-attr]  # a small frame


async def test_the_servers_deadline_is_the_same_error(pair: Any) -> None:
    status = ttrpc_pb2.Status(code=Status.DEADLINE_EXCEEDED, message="context deadline exceeded")
    async with pair() as (client, peer), anyio.create_task_group() as tasks:

        async def ask() -> None:
            with raises(DeadlineExceeded):
                await _say(client, timeout=60)
            with pytest.raises(RemoteError):
                await _say(client)

        tasks.start_soon(ask)
        for stream_id in (1, 3):
            await peer.receive()
            await peer.send(_response(stream_id, status=status))


async def test_a_request_that_is_too_large_is_not_sent(serve: Any, connected: Any) -> None:
    async with serve({"Say": echo}) as served, connected(served.path) as client:
        with pytest.raises(MessageTooLarge) as caught:
            await _say(client, "x" * DATA_MAX)
        assert caught.value.status == Status.RESOURCE_EXHAUSTED
        assert await _say(client) == "hi"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (encode(1, RESPONSE, 0, b"\xff\xff"), UndecodableMessage),
        (_response(1, payload=b"\xff\xff"), UndecodableMessage),
        (encode(1, DATA, 0, b"x"), RemoteProtocolError),
        ((DATA_MAX + 1).to_bytes(4, "big") + encode(1, RESPONSE, 0)[4:], MessageTooLarge),
    ],
)
async def test_a_wrong_answer_fails_its_call(
    answer: bytes, error: Kind[NvshimError], pair: Any
) -> None:
    async with _asked(pair, error) as (client, peer):
        await peer.send(answer)
        await anyio.wait_all_tasks_blocked()
        assert not client.closed


@pytest.mark.parametrize("answer", [_response(99), encode(1, REQUEST, 0)])
async def test_an_answer_to_no_question_ends_the_connection(answer: bytes, pair: Any) -> None:
    async with _asked(pair, ConnectionClosed, "NVSHIM-E0003") as (_, peer):
        await peer.send(answer)


async def test_requests_reach_the_wire_in_the_order_of_their_ids_under_pressure(pair: Any) -> None:
    large = "x" * (1 << 20)
    async with pair() as (client, peer), anyio.create_task_group() as tasks:

        async def ask(number: int) -> None:
            await _say(client, large if number % 2 else "small")

        for number in range(20):
            tasks.start_soon(ask, number)
        await anyio.wait_all_tasks_blocked()
        # A call that is cancelled while it waits for buffer space must leave no partial frame.
        with anyio.move_on_after(0.01):
            await ask(1)
        reader = FrameReader()
        ids: list[int] = []
        with anyio.fail_after(5):
            while len(ids) < 20:
                for frame in reader.feed(await peer.receive(1 << 20)):
                    ids.append(frame.stream_id)
                    await peer.send(_response(frame.stream_id))
    assert ids == sorted(ids)
    assert len(set(ids)) == 20
