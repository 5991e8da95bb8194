"""Streaming calls, end to end and in every direction."""

from __future__ import annotations

import socket
import time
from typing import Any

import anyio
import pytest
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from api.errors import Status
from api.proto import ttrpc_pb2
from api.ttrpc import (
    ConnectionClosed,
    Context,
    DeadlineExceeded,
    LocalProtocolError,
    MessageTooLarge,
    Overloaded,
    RemoteError,
    Stream,
    StreamClosed,
)
from api.ttrpc.client import Client
from api.ttrpc.frames import (
    DATA,
    DATA_MAX,
    NO_DATA,
    REMOTE_CLOSED,
    REMOTE_OPEN,
    REQUEST,
    RESPONSE,
    FrameReader,
    encode,
)
from tests.harness.raising import raises
from tests.unit.ttrpc.calls import NAME, Caller, OutOfCheese, echo

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def collect(_: Context, stream: Stream) -> StringValue:
    return StringValue(value=" ".join([message.value async for message in stream]))


async def count(_: Context, stream: Stream) -> None:
    request = await stream.receive()
    with pytest.raises(anyio.EndOfStream):
        await stream.receive()
    for number in range(int(request.value)):
        await stream.send(StringValue(value=str(number)))


async def chat(_: Context, stream: Stream) -> None:
    async for message in stream:
        await stream.send(StringValue(value=message.value.upper()))


class Hanging:
    """A handler that does not read, and runs until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = anyio.Event()

    async def __call__(self, _: Context, stream: Stream) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            self.cancelled.set()


def _text(text: str) -> bytes:
    return StringValue(value=text).SerializeToString()


async def test_a_client_that_streams_gets_one_answer(calling: Any) -> None:
    async with calling({"Collect": collect}) as caller, caller.open("Collect") as stream:
        for word in ("one", "two", "", "four"):
            await stream.send(StringValue(value=word))
        await stream.finish()
        assert (await stream.receive()).value == "one two  four"
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()


async def test_a_server_that_streams_is_read_to_its_end(calling: Any) -> None:
    async with (
        calling({"Count": count}) as caller,
        caller.open("Count", StringValue(value="500")) as stream,
    ):
        assert [message.value async for message in stream] == [str(n) for n in range(500)]


async def test_both_stream_in_turn_and_streams_do_not_mix(calling: Any) -> None:
    async with calling({"Chat": chat}) as caller:

        async def talk(name: str) -> None:
            async with caller.open("Chat") as stream:
                for number in range(20):
                    await stream.send(StringValue(value=f"{name}{number}"))
                    assert (await stream.receive()).value == f"{name.upper()}{number}"
                await stream.finish()
                assert [message async for message in stream] == []

        async with anyio.create_task_group() as tasks:
            for name in "abcdefghij":
                tasks.start_soon(talk, name)


async def test_an_empty_request_is_a_message_where_only_the_server_streams(calling: Any) -> None:
    async def once(_: Context, stream: Stream) -> None:
        await stream.send(await stream.receive())

    async with (
        calling({"Count": once}) as caller,
        caller.open("Count", StringValue()) as stream,
    ):
        with anyio.fail_after(20):
            assert [message.value async for message in stream] == [""]


async def test_a_streams_failure_comes_after_what_was_sent_before(calling: Any) -> None:
    async def fail(_: Context, stream: Stream) -> None:
        await stream.send(StringValue(value="first"))
        raise OutOfCheese("more", found="no more")

    async with calling({"Chat": fail}) as caller, caller.open("Chat") as stream:
        assert (await stream.receive()).value == "first"
        with pytest.raises(RemoteError, match="no more") as caught:
            await stream.receive()
        assert caught.value.status == Status.FAILED_PRECONDITION
        with raises(StreamClosed):
            await stream.send(StringValue())


async def test_a_server_may_end_before_the_client_has(calling: Any) -> None:
    async def first_only(_: Context, stream: Stream) -> None:
        await stream.send(await stream.receive())

    async with calling({"Chat": first_only}) as caller:
        async with caller.open("Chat") as stream:
            await stream.send(StringValue(value="1"))
            # In flight when the server ends; it arrives late, and is harmless.
            await stream.send(StringValue(value="2"))
            assert [message.value async for message in stream] == ["1"]
        async with caller.open("Chat") as stream:
            await stream.send(StringValue(value="again"))
            assert [message.value async for message in stream] == ["again"]


async def test_leaving_the_block_tells_the_server_that_we_are_done(
    calling: Any, until: Any
) -> None:
    heard: list[list[str]] = []

    async def listen(_: Context, stream: Stream) -> StringValue:
        heard.append([message.value async for message in stream])
        return StringValue()

    async with calling({"Collect": listen}) as caller:
        async with caller.open("Collect") as stream:
            await stream.send(StringValue(value="then silence"))
        await until(lambda: heard == [["then silence"]])
        assert not caller.client.closed


async def test_a_stream_that_takes_too_long_is_cancelled_on_both_sides(calling: Any) -> None:
    hang = Hanging()
    async with calling({"Chat": hang}) as caller:

        async def wait_for_ever() -> None:
            async with caller.open("Chat", timeout=0.03) as stream:
                await stream.receive()

        with raises(DeadlineExceeded):
            await wait_for_ever()
        with anyio.fail_after(20):
            await hang.cancelled.wait()
        assert not caller.client.closed


async def test_what_a_stream_block_raises_comes_out_as_it_is(calling: Any) -> None:
    async with calling({"Chat": chat}) as caller:
        with pytest.raises(KeyError):
            async with caller.open("Chat", timeout=5):
                raise KeyError


async def test_a_lost_connection_ends_the_stream(calling: Any) -> None:
    async with calling({"Chat": chat}) as caller, caller.open("Chat") as stream:
        await stream.send(StringValue(value="a"))
        assert (await stream.receive()).value == "A"
        caller.served.server.close(0)
        with anyio.fail_after(20), pytest.raises(ConnectionClosed):
            await stream.receive()
        with pytest.raises(ConnectionClosed):
            await stream.send(StringValue())


async def test_a_handler_sends_only_what_its_method_streams(calling: Any) -> None:
    async def wrong_method(_: Context, stream: Stream) -> StringValue:
        with raises(LocalProtocolError, match="does not stream"):
            await stream.send(StringValue())
        return StringValue(value="told")

    async def wrong_type(_: Context, stream: Stream) -> None:
        with raises(LocalProtocolError, match="not StringValue"):
            await stream.send(Int32Value())
        with pytest.raises(MessageTooLarge):
            await stream.send(StringValue(value="x" * DATA_MAX))
        await stream.send(StringValue(value="told"))

    handlers = {"Collect": wrong_method, "Chat": wrong_type}
    async with calling(handlers) as caller:
        for method in handlers:
            async with caller.open(method) as stream:
                assert (await stream.receive()).value == "told"


async def test_a_client_sends_only_what_its_method_streams(calling: Any) -> None:
    async with calling({"Chat": chat, "Count": count}) as caller:
        with raises(LocalProtocolError):
            caller.open("Chat", StringValue())
        with raises(LocalProtocolError):
            caller.open("Count")
        async with caller.open("Count", StringValue(value="0")) as stream:
            with raises(LocalProtocolError, StreamClosed):
                await stream.send(StringValue())
        async with caller.open("Chat") as stream:
            with raises(LocalProtocolError, match="not StringValue"):
                await stream.send(Int32Value())
            await stream.finish()
            with raises(LocalProtocolError):
                await stream.send(StringValue())


async def test_a_unary_call_is_a_stream_of_one_and_takes_one_answer(
    calling: Any,
) -> None:
    async with calling({"Count": count, "Collect": collect}) as caller:
        assert await caller.say("one", method="Collect") == "one"
        with pytest.raises(RemoteError, match="streams its answer") as caught:
            await caller.say(method="Count")
        assert caught.value.status == Status.INVALID_ARGUMENT


async def test_the_first_message_may_come_with_the_request(serve: Any) -> None:
    request = ttrpc_pb2.Request(service=NAME, method="Collect", payload=_text("first"))
    async with serve({"Collect": collect}) as served, served.raw() as raw:
        await raw.send(
            encode(1, REQUEST, REMOTE_OPEN, request.SerializeToString())
            + encode(1, DATA, 0, _text("second"))
            + encode(1, DATA, REMOTE_CLOSED, _text("last"))
        )
        response = (await raw.answers(1))[1]
        assert response.payload == _text("first second last")


async def test_data_that_break_a_rule_cancel_the_handler_and_are_answered_once(serve: Any) -> None:
    hang = Hanging()
    request = ttrpc_pb2.Request(service=NAME, method="Chat").SerializeToString()
    async with serve({"Chat": hang, "Collect": collect}) as served, served.raw() as raw:
        await raw.send(encode(1, REQUEST, REMOTE_OPEN, request))
        await served.until_calls(1)
        await raw.send(encode(1, DATA, NO_DATA, b"data all the same"))
        assert (await raw.answers(1))[1].status.code == Status.INVALID_ARGUMENT
        with anyio.fail_after(20):
            await hang.cancelled.wait()
        # Nothing else is sent on that stream: the next answer is that of another.
        await raw.request(3, "Collect", "x")
        assert list(await raw.answers(1)) == [3]
        assert served.log == []


async def test_a_handler_that_does_not_read_loses_its_stream_and_nothing_else(calling: Any) -> None:
    hang = Hanging()
    async with calling({"Chat": hang, "Say": echo}) as caller:
        began = time.monotonic()
        async with caller.open("Chat") as stream:

            async def send_for_ever() -> None:
                with anyio.fail_after(10):
                    while True:
                        await stream.send(StringValue(value="x" * (64 << 10)))

            with raises(StreamClosed):
                await send_for_ever()
            with pytest.raises(RemoteError, match="has not read") as caught:
                await stream.receive()
            assert caught.value.status == Status.RESOURCE_EXHAUSTED
        assert 0.9 < time.monotonic() - began < 10
        with anyio.fail_after(20):
            await hang.cancelled.wait()
        await caller.say()


async def test_a_handler_that_reads_slowly_slows_the_client_and_loses_nothing(calling: Any) -> None:
    async def slow(_: Context, stream: Stream) -> StringValue:
        total = 0
        async for message in stream:
            await anyio.sleep(0.001)
            total += len(message.value)
        return StringValue(value=str(total))

    size, number = 16 << 10, 300
    async with calling({"Collect": slow}) as caller, caller.open("Collect") as stream:
        for _ in range(number):
            await stream.send(StringValue(value="x" * size))
        await stream.finish()
        assert (await stream.receive()).value == str(size * number)


async def test_what_nobody_has_read_is_dropped_with_its_stream_on_both_sides(
    calling: Any, until: Any
) -> None:
    heard = anyio.Event()

    async def say_and_leave(_: Context, stream: Stream) -> None:
        await stream.send(StringValue(value="x" * 1000))
        await heard.wait()

    async with calling({"Chat": say_and_leave}) as caller:
        ours = caller.client._multiplexer.budget
        async with caller.open("Chat") as stream:
            await stream.send(StringValue(value="y" * 1000))
            await until(lambda: ours._held >= 1000)
            (session,) = caller.served.server._sessions
            await until(lambda: session._budget._held >= 1000)
        assert ours._held == 0
        heard.set()
        await until(lambda: session._budget._held == 0)


async def test_a_caller_that_does_not_read_loses_its_stream_and_nothing_else(calling: Any) -> None:
    async def flood(_: Context, stream: Stream) -> None:
        for _number in range(1000):
            await stream.send(StringValue(value="x" * 1000))

    async with (
        calling({"Chat": flood, "Say": echo}) as caller,
        caller.open("Chat") as stream,
    ):
        await anyio.sleep(1.2)
        await caller.say(timeout=5)
        received = 0

        async def receive_all() -> None:
            nonlocal received
            async for _ in stream:
                received += 1

        with raises(Overloaded):
            await receive_all()
        assert 0 < received < 1000


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        # How Go servers end a stream: a bare end, a response with the only answer, a status.
        ([encode(1, DATA, REMOTE_CLOSED | NO_DATA)], []),
        ([encode(1, DATA, 0, _text("a")), encode(1, DATA, REMOTE_CLOSED, _text("b"))], ["a", "b"]),
        ([encode(1, RESPONSE, 0)], []),
        (
            [
                encode(1, DATA, 0, _text("a")),
                encode(1, RESPONSE, 0, ttrpc_pb2.Response(payload=_text("b")).SerializeToString()),
            ],
            ["a", "b"],
        ),
        # A final response after the end is ignored.
        ([encode(1, DATA, REMOTE_CLOSED | NO_DATA), encode(1, RESPONSE, 0)], []),
    ],
)
async def test_every_way_of_ending_a_stream_is_understood(
    frames: list[bytes], expected: list[str]
) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        async with anyio.create_task_group() as tasks:
            client = Client(ours, tasks)
            async with Caller(client).open("Count", StringValue()) as stream:
                (request,) = FrameReader().feed(theirs.recv(1000))
                assert (request.type, request.flags) == (REQUEST, REMOTE_CLOSED)
                for frame in frames:
                    theirs.send(frame)
                assert [message.value async for message in stream] == expected
                assert not client.closed
            client.close()
