"""Handlers that answer at once: as those in tasks, but in order, and before what comes later."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from api.errors import NvshimError, Status
from api.proto import ttrpc_pb2
from api.ttrpc import Context, LocalProtocolError, RemoteError, Service
from api.ttrpc.client import connect
from api.ttrpc.frames import REQUEST, encode

pytestmark = pytest.mark.anyio


class OutOfBread(NvshimError):
    """A typed failure of a handler."""

    code = "NVSHIM-E9998"
    status = Status.NOT_FOUND


def echo(_: Context, request: StringValue) -> StringValue:
    return StringValue(value=request.value)


async def _call(client: Any, service: str, text: str = "hi") -> str:
    answer = await client.call(service, "Say", StringValue(value=text), StringValue)
    return str(answer.value)


async def test_it_is_answered_with_what_it_returns(serve: Any, service: str) -> None:
    seen: list[Context] = []

    def look(context: Context, request: StringValue) -> StringValue:
        seen.append(context)
        return request

    async with serve({}, immediate={"Say": look}) as served, connect(served.path) as client:
        answer = await client.call(
            service,
            "Say",
            StringValue(value="hello"),
            StringValue,
            timeout=5,
            metadata=(("a", "b"),),
        )
        assert answer.value == "hello"
    assert (seen[0].service, seen[0].method, seen[0].timeout) == (service, "Say", 5)
    assert seen[0].values("a") == ["b"]


async def test_a_task_that_waits_holds_it_up_no_more_than_another(serve: Any, service: str) -> None:
    release = anyio.Event()

    async def hang(_: Context, request: StringValue) -> StringValue:
        await release.wait()
        return request

    async with (
        serve({"Other": hang}, immediate={"Say": echo}) as served,
        connect(served.path) as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(client.call, service, "Other", StringValue(), StringValue)
        await served.until_calls(1)
        with anyio.fail_after(20):
            assert await _call(client, service) == "hi"
        release.set()


async def test_requests_of_one_read_are_answered_in_their_order(serve: Any, service: str) -> None:
    seen: list[str] = []

    def note(_: Context, request: StringValue) -> StringValue:
        seen.append(request.value)
        return request

    frames = bytearray()
    for number in range(200):
        payload = StringValue(value=str(number)).SerializeToString()
        request = ttrpc_pb2.Request(service=service, method="Say", payload=payload)
        frames += encode(2 * number + 1, REQUEST, 0, request.SerializeToString())
    async with serve({}, immediate={"Say": note}) as served, served.raw() as raw:
        await raw.send(bytes(frames))
        answers = await raw.answers(200)
    assert seen == [str(number) for number in range(200)]
    assert list(answers) == [2 * number + 1 for number in range(200)]


@pytest.mark.parametrize("method", ["Say", "Other", "Unknown"])
async def test_a_request_broken_in_the_same_read_ends_neither_connection_nor_server(
    serve: Any, service: str, method: str
) -> None:
    async def slow(_: Context, request: StringValue) -> StringValue:
        await anyio.sleep(0.01)
        return request

    request = ttrpc_pb2.Request(service=service, method=method).SerializeToString()
    async with (
        serve({"Other": slow}, immediate={"Say": echo}) as served,
        served.raw() as raw,
        served.raw() as another,
    ):
        # The same id a second time breaks the stream before its first request is looked at.
        await raw.send(encode(1, REQUEST, 0, request) * 2)
        assert (await raw.answers(1))[1].status.code == Status.INVALID_ARGUMENT
        for client in (raw, another):
            await client.request(3, "Say", "still there")
            assert not (await client.answers(1))[3].status.code


async def test_what_it_raises_is_its_answer(serve: Any, service: str) -> None:
    def fail(_: Context, request: StringValue) -> StringValue:
        if request.value == "typed":
            raise OutOfBread("bread", found="crumbs", do="bake")
        if request.value == "wrong":
            return Int32Value(value=3)  # type: ignore[return-value]
        raise ValueError("nobody foresaw this")

    async with serve({}, immediate={"Say": fail}) as served, connect(served.path) as client:
        statuses = []
        for text in ("typed", "wrong", "else"):
            with pytest.raises(RemoteError) as caught:
                await _call(client, service, text)
            statuses.append(caught.value.status)
        assert statuses == [Status.NOT_FOUND, Status.INTERNAL, Status.INTERNAL]
        assert [event for event, _ in served.log] == ["a handler failed"] * 2
    assert "ValueError" in served.log[1][1]["traceback"]


async def test_a_payload_that_is_no_message_is_the_clients_fault(serve: Any, service: str) -> None:
    async with serve({}, immediate={"Say": echo}) as served, served.raw() as raw:
        await raw.request(1, "Say", payload=b"\xff\xff")
        assert (await raw.answers(1))[1].status.code == Status.INVALID_ARGUMENT
        await raw.request(3, "Say", "still there")
        assert not (await raw.answers(1))[3].status.code


async def test_a_client_that_does_not_read_is_not_kept_answers_for_without_end(
    serve: Any, service: str
) -> None:
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


async def test_it_is_answered_by_a_server_that_waits_for_others_to_end(
    serve: Any, service: str
) -> None:
    """Nothing has to be begun for it; so a second Shutdown, say, is answered as the first was."""
    release = anyio.Event()

    async def hang(_: Context, request: StringValue) -> StringValue:
        await release.wait()
        return request

    async with serve({"Other": hang}, immediate={"Say": echo}) as served, served.raw() as raw:
        await raw.request(1, "Other")
        await served.until_calls(1)
        served.server.close()
        await raw.request(3, "Say", "still there")
        assert not (await raw.answers(1))[3].status.code
        await raw.request(5, "Other")
        assert (await raw.answers(1))[5].status.code == Status.UNAVAILABLE
        release.set()
        assert 1 in await raw.answers(1)


async def test_one_that_closes_the_server_is_answered_with_all_that_came_with_it(
    serve: Any, service: str
) -> None:
    def stop(_: Context, request: StringValue) -> StringValue:
        served.server.close()
        return request

    request = ttrpc_pb2.Request(service=service, method="Say").SerializeToString()
    frames = b"".join(encode(stream, REQUEST, 0, request) for stream in (1, 3, 5))
    async with serve({}, immediate={"Say": stop}) as served, served.raw() as raw:
        await raw.send(frames)
        answers = await raw.answers(3)
        assert [answers[stream].status.code for stream in (1, 3, 5)] == [0, 0, 0]
        with anyio.fail_after(20):
            await served.returned.wait()


def test_a_method_that_streams_cannot_answer_at_once(descriptor: ServiceDescriptor) -> None:
    with pytest.raises(LocalProtocolError, match="streams"):
        Service(descriptor, {}, immediate={"Collect": echo})
