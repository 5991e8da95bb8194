"""The client on a real socket: losing, cancelling and giving up."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from api.errors import Status
from api.proto import ttrpc_pb2
from api.ttrpc import (
    Client,
    ConnectFailed,
    ConnectionClosed,
    Context,
    DeadlineExceeded,
    MessageTooLarge,
    RemoteError,
    RemoteProtocolError,
    UndecodableMessage,
    connect,
    dial,
)
from api.ttrpc.frames import DATA, DATA_MAX, REQUEST, RESPONSE, FrameReader, encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def echo(_: Context, request: StringValue) -> StringValue:
    return request


async def hang(_: Context, request: StringValue) -> StringValue:
    await anyio.sleep_forever()
    return request


async def _say(client: Client, text: str = "hi", **options: Any) -> str:
    answer = await client.call(
        "nvshim.test.Echo", "Say", StringValue(value=text), StringValue, **options
    )
    return answer.value


@contextlib.asynccontextmanager
async def _pair() -> AsyncIterator[tuple[Client, anyio.abc.SocketStream]]:
    """A client and, in place of a server, the bare other end."""
    ours, theirs = socket.socketpair()
    async with (
        anyio.create_task_group() as tasks,
        await anyio.abc.UNIXSocketStream.from_socket(theirs) as peer,
    ):
        client = Client(ours, tasks)
        yield client, peer
        client.close()


def _response(stream_id: int, text: str = "", **fields: Any) -> bytes:
    fields = {"payload": StringValue(value=text).SerializeToString()} | fields
    return encode(stream_id, RESPONSE, 0, ttrpc_pb2.Response(**fields).SerializeToString())


async def test_a_client_lives_in_a_task_group_of_ones_own(serve: Any) -> None:
    async with serve({"Say": echo}) as served, anyio.create_task_group() as tasks:
        client = Client(await dial(served.path), tasks)
        assert await _say(client) == "hi"
        assert not client.closed
        client.close()
        assert client.closed


async def test_nobody_listening_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ConnectFailed, match="ENOENT"):
        async with connect(str(tmp_path / "missing")):
            pass
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead"))
    with pytest.raises(ConnectFailed, match="ECONNREFUSED"):
        async with connect(str(tmp_path / "dead")):
            pass
    with pytest.raises(ConnectFailed, match="too long"):
        async with connect("/" + "x" * 200):
            pass


async def test_a_full_backlog_is_waited_for(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as waiting:
        listener.bind(path)
        listener.listen(0)
        waiting.enter_context(contextlib.closing(await dial(path)))
        with pytest.raises(ConnectFailed, match="backlog"):
            await dial(path, timeout=0.03)
        async with anyio.create_task_group() as tasks:

            async def connect_in_the_end() -> None:
                waiting.enter_context(contextlib.closing(await dial(path, timeout=5)))

            tasks.start_soon(connect_in_the_end)
            await anyio.sleep(0.03)
            listener.accept()[0].close()


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


async def test_all_calls_fail_at_once_when_the_connection_is_lost() -> None:
    failed: list[str] = []
    async with _pair() as (client, peer), anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(ConnectionClosed, match="the server closed it"):
                await _say(client)
            failed.append("once")

        for _ in range(10):
            tasks.start_soon(ask)
        await peer.receive()
        await peer.aclose()
        with anyio.fail_after(1):
            await client.wait_closed()
    assert failed == ["once"] * 10
    assert client.closed


async def test_an_answer_before_the_loss_counts() -> None:
    async with _pair() as (client, peer), anyio.create_task_group() as tasks:

        async def ask() -> None:
            assert await _say(client) == "in time"

        tasks.start_soon(ask)
        await peer.receive()
        await peer.send(_response(1, "in time"))
        await peer.aclose()


async def test_a_call_after_the_loss_fails_without_waiting() -> None:
    async with _pair() as (client, peer):
        await peer.aclose()
        await client.wait_closed()
        with anyio.fail_after(1), pytest.raises(ConnectionClosed, match="connect again"):
            await _say(client)


async def test_closing_it_ourselves_fails_the_calls_too(serve: Any) -> None:
    async with (
        serve({"Say": hang}) as served,
        connect(served.path) as client,
        anyio.create_task_group() as tasks,
    ):

        async def ask() -> None:
            with pytest.raises(ConnectionClosed, match="closed on this side"):
                await _say(client)

        tasks.start_soon(ask)
        await served.until_calls(1)
        client.close()
        client.close()


async def test_a_closed_connections_number_is_not_used_again_while_a_task_waits_for_it() -> None:
    ours, theirs = socket.socketpair()
    number = ours.fileno()
    with theirs:
        async with anyio.create_task_group() as tasks:
            client = Client(ours, tasks)
            await anyio.wait_all_tasks_blocked()
            client.close()
            assert theirs.recv(1) == b""
            # The loop would take a new socket of that number for the old one.
            one, other = socket.socketpair()
            with one, other:
                assert number not in {one.fileno(), other.fileno()}
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)


async def test_cancelling_the_task_group_closes_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        async with anyio.create_task_group() as tasks:
            client = Client(ours, tasks)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        assert client.closed
        assert theirs.recv(1) == b""


async def test_a_cancelled_call_leaves_the_connection_healthy(serve: Any) -> None:
    release = anyio.Event()

    async def wait(_: Context, request: StringValue) -> StringValue:
        if request.value == "slow":
            await release.wait()
        return request

    async with serve({"Say": wait}) as served, connect(served.path) as client:
        with anyio.move_on_after(0.02) as scope:
            await _say(client, "slow")
        assert scope.cancelled_caught
        # Its answer comes now, late, and must not be taken for another's.
        release.set()
        for number in range(5):
            assert await _say(client, str(number)) == str(number)
        assert not client._multiplexer._calls


async def test_a_timeout_is_over_here_although_the_server_says_nothing() -> None:
    async with _pair() as (client, peer):
        with pytest.raises(DeadlineExceeded, match=r"0\.02 s") as caught:
            await _say(client, timeout=0.02)
        assert caught.value.status == Status.DEADLINE_EXCEEDED
        (frame,) = FrameReader().feed(await peer.receive())
        assert ttrpc_pb2.Request.FromString(frame.data).timeout_nano == 20_000_000  # type: ignore[union-attr]  # a small frame


@pytest.mark.parametrize(
    ("timeout", "nanoseconds"), [(None, 0), (1.5, 1_500_000_000), (1e-12, 1), (1e300, 9 * 10**18)]
)
async def test_a_timeout_goes_on_the_wire_in_nanoseconds(
    timeout: float | None, nanoseconds: int
) -> None:
    async with _pair() as (client, peer):
        # Cancelled by us, or by the shortest of these timeouts.
        with contextlib.suppress(DeadlineExceeded), anyio.move_on_after(0.01):
            await _say(client, timeout=timeout)
        with anyio.move_on_after(1):
            (frame,) = FrameReader().feed(await peer.receive())
            assert ttrpc_pb2.Request.FromString(frame.data).timeout_nano == nanoseconds  # type: ignore[union-attr]  # a small frame


async def test_the_servers_deadline_is_the_same_error() -> None:
    status = ttrpc_pb2.Status(code=Status.DEADLINE_EXCEEDED, message="context deadline exceeded")
    async with _pair() as (client, peer), anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(DeadlineExceeded):
                await _say(client, timeout=60)
            with pytest.raises(RemoteError):
                await _say(client)

        tasks.start_soon(ask)
        for stream_id in (1, 3):
            await peer.receive()
            await peer.send(_response(stream_id, status=status))


async def test_a_request_that_is_too_large_is_not_sent(serve: Any) -> None:
    async with serve({"Say": echo}) as served, connect(served.path) as client:
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
async def test_a_wrong_answer_fails_its_call(answer: bytes, error: type[Exception]) -> None:
    async with _pair() as (client, peer), anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(error):
                await _say(client)
            assert not client.closed

        tasks.start_soon(ask)
        await peer.receive()
        await peer.send(answer)


@pytest.mark.parametrize("answer", [_response(99), encode(1, REQUEST, 0)])
async def test_an_answer_to_no_question_ends_the_connection(answer: bytes) -> None:
    async with _pair() as (client, peer), anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(ConnectionClosed, match="NVSHIM-E0003"):
                await _say(client)

        tasks.start_soon(ask)
        await peer.receive()
        await peer.send(answer)


async def test_requests_reach_the_wire_in_the_order_of_their_ids_under_pressure() -> None:
    large = "x" * (1 << 20)
    async with _pair() as (client, peer), anyio.create_task_group() as tasks:

        async def ask(number: int) -> None:
            await _say(client, large if number % 2 else "small")

        for number in range(20):
            tasks.start_soon(ask, number)
        await anyio.wait_all_tasks_blocked()
        # A call that is cancelled while it waits for room must leave no half frame.
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
