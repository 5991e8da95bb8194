"""Immediate handlers answer like those in tasks, but in order, and before later requests."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from api.errors import Status
from api.proto import ttrpc_pb2
from api.ttrpc import Context, LocalProtocolError, Service
from api.ttrpc.frames import REQUEST, encode
from tests.harness.raising import raises
from tests.unit.ttrpc.calls import NAME, Gate, OutOfCheese, echo_at_once

pytestmark = pytest.mark.anyio


async def test_a_task_that_waits_holds_it_up_no_more_than_another(calling: Any) -> None:
    gate = Gate()
    async with (
        calling({"Other": gate}, immediate={"Say": echo_at_once}) as caller,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(caller.other)
        await caller.served.until_calls(1)
        with anyio.fail_after(20):
            assert await caller.say() == "hi"
        gate.open.set()


async def test_requests_of_one_read_are_answered_in_their_order(serve: Any) -> None:
    seen: list[str] = []

    def note(_: Context, request: StringValue) -> StringValue:
        seen.append(request.value)
        return request

    frames = bytearray()
    for number in range(200):
        payload = StringValue(value=str(number)).SerializeToString()
        request = ttrpc_pb2.Request(service=NAME, method="Say", payload=payload)
        frames += encode(2 * number + 1, REQUEST, 0, request.SerializeToString())
    async with serve({}, immediate={"Say": note}) as served, served.raw() as raw:
        await raw.send(bytes(frames))
        answers = await raw.answers(200)
    assert seen == [str(number) for number in range(200)]
    assert list(answers) == [2 * number + 1 for number in range(200)]


@pytest.mark.parametrize("method", ["Say", "Other", "Unknown"])
async def test_a_request_broken_in_the_same_read_ends_neither_connection_nor_server(
    serve: Any, method: str
) -> None:
    async def slow(_: Context, request: StringValue) -> StringValue:
        await anyio.sleep(0.01)
        return request

    request = ttrpc_pb2.Request(service=NAME, method=method).SerializeToString()
    async with (
        serve({"Other": slow}, immediate={"Say": echo_at_once}) as served,
        served.raw() as raw,
        served.raw() as another,
    ):
        # Reusing the id breaks the stream before its first request is handled.
        await raw.send(encode(1, REQUEST, 0, request) * 2)
        assert (await raw.answers(1))[1].status.code == Status.INVALID_ARGUMENT
        for client in (raw, another):
            await client.request(3, "Say", "still there")
            assert not (await client.answers(1))[3].status.code


async def test_what_it_raises_is_its_answer(calling: Any) -> None:
    def fail(_: Context, request: StringValue) -> StringValue:
        if request.value == "typed":
            raise OutOfCheese("bread", found="crumbs", do="bake")
        if request.value == "wrong":
            return Int32Value(value=3)  # type: ignore[return-value]
        raise ValueError("unexpected")

    async with calling({}, immediate={"Say": fail}) as caller:
        for text in ("typed", "wrong", "else"):
            await caller.ask(text)
        expected = [Status.FAILED_PRECONDITION, Status.INTERNAL, Status.INTERNAL]
        assert caller.outcomes == expected
        assert [event for event, _ in caller.served.log] == ["a handler failed"] * 2
    assert "ValueError" in caller.served.log[1][1]["traceback"]


async def test_a_payload_that_is_no_message_is_the_clients_fault(serve: Any) -> None:
    async with serve({}, immediate={"Say": echo_at_once}) as served, served.raw() as raw:
        await raw.request(1, "Say", payload=b"\xff\xff")
        assert (await raw.answers(1))[1].status.code == Status.INVALID_ARGUMENT
        await raw.request(3, "Say", "still there")
        assert not (await raw.answers(1))[3].status.code


async def test_a_client_that_does_not_read_is_not_kept_answers_for_without_end(serve: Any) -> None:
    answered = 0

    def much(_: Context, request: StringValue) -> StringValue:
        nonlocal answered
        answered += 1
        return StringValue(value="x" * (1 << 20))

    async with serve({}, immediate={"Say": much}) as served, served.raw() as raw:
        for number in range(50):
            await raw.request(2 * number + 1, "Say")
        await anyio.sleep(0.2)
        assert answered < 10, "answers are made only as they are taken"
        assert len(await raw.answers(50)) == 50
    assert answered == 50


async def test_it_is_answered_by_a_server_that_waits_for_others_to_end(serve: Any) -> None:
    """It needs no new task; so a second Shutdown, for example, is answered like the first."""
    gate = Gate()
    async with (
        serve({"Other": gate}, immediate={"Say": echo_at_once}) as served,
        served.raw() as raw,
    ):
        await raw.request(1, "Other")
        await served.until_calls(1)
        served.server.close()
        await raw.request(3, "Say", "still there")
        assert not (await raw.answers(1))[3].status.code
        await raw.request(5, "Other")
        assert (await raw.answers(1))[5].status.code == Status.UNAVAILABLE
        gate.open.set()
        assert 1 in await raw.answers(1)


async def test_one_that_closes_the_server_is_answered_with_all_that_came_with_it(
    serve: Any,
) -> None:
    def stop(_: Context, request: StringValue) -> StringValue:
        served.server.close()
        return request

    request = ttrpc_pb2.Request(service=NAME, method="Say").SerializeToString()
    frames = b"".join(encode(stream, REQUEST, 0, request) for stream in (1, 3, 5))
    async with serve({}, immediate={"Say": stop}) as served, served.raw() as raw:
        await raw.send(frames)
        answers = await raw.answers(3)
        assert [answers[stream].status.code for stream in (1, 3, 5)] == [0, 0, 0]
        with anyio.fail_after(20):
            await served.returned.wait()


def test_a_method_that_streams_cannot_answer_at_once(descriptor: ServiceDescriptor) -> None:
    with raises(LocalProtocolError, match="streams"):
        Service(descriptor, {}, immediate={"Collect": echo_at_once})
