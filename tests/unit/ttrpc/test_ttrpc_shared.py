"""Methods whose equal requests share one call, and methods that are never refused."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.wrappers_pb2 import StringValue

from api.errors import NvshimError, Status
from api.ttrpc import Context, LocalProtocolError, Service
from api.ttrpc.client import connect
from api.ttrpc.frames import DATA, encode
from tests.harness.raising import raises
from tests.unit.ttrpc.calls import Caller, Gate, OutOfCheese, echo_at_once

pytestmark = pytest.mark.anyio

SHARED: dict[str, Any] = {"immediate": {"Other": echo_at_once}, "shared": ["Say"]}


async def test_equal_requests_are_one_call_and_all_are_answered(calling: Any) -> None:
    gate = Gate()
    async with (
        calling({"Say": gate}, **SHARED, max_calls=1) as caller,
        anyio.create_task_group() as tasks,
    ):
        for text in ("hi",) * 200 + ("ho",) * 200:
            tasks.start_soon(caller.ask, text)
        await caller.served.until_calls(2)
        await caller.other()
        assert caller.served.calls == 2
        gate.open.set()
    assert sorted(map(str, caller.outcomes)) == ["HI"] * 200 + ["HO"] * 200


async def test_who_sets_a_timeout_has_a_call_of_its_own(calling: Any) -> None:
    gate = Gate()
    async with (
        calling({"Say": gate}, **SHARED, max_calls=1) as caller,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(caller.ask)
        await caller.served.until_calls(1)
        with pytest.raises(NvshimError) as caught:
            await caller.say(timeout=0.01)
        assert caught.value.status == Status.DEADLINE_EXCEEDED
        assert caller.served.calls == 2
        gate.open.set()
    assert caller.outcomes == ["HI"]


async def test_each_connection_has_its_own_and_the_next_request_its_own_answer(
    calling: Any,
) -> None:
    gate = Gate()
    async with calling({"Say": gate}, **SHARED) as first, connect(first.served.path) as another:
        second = Caller(another)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first.ask)
            tasks.start_soon(second.ask)
            await first.served.until_calls(2)
            gate.open.set()
        gate.failure = OutOfCheese("to say", found="a sore throat")
        await first.ask()
    assert first.outcomes == ["HI", Status.FAILED_PRECONDITION]
    assert second.outcomes == ["HI"]


async def test_a_failure_is_everybodys(calling: Any) -> None:
    gate = Gate(OutOfCheese("to say", found="a sore throat"))
    async with (
        calling({"Say": gate}, **SHARED) as caller,
        anyio.create_task_group() as tasks,
    ):
        for _ in range(3):
            tasks.start_soon(caller.ask)
        await caller.served.until_calls(1)
        await caller.other()
        gate.open.set()
    assert caller.outcomes == [Status.FAILED_PRECONDITION] * 3


async def test_a_stream_that_its_client_breaks_is_answered_alone(serve: Any) -> None:
    gate = Gate()
    async with serve({"Say": gate}, shared=["Say"]) as served, served.raw() as raw:
        for stream_id in (1, 3, 5):
            await raw.request(stream_id, "Say", "hi")
        await served.until_calls(1)
        for stream_id in (1, 5):
            await raw.send(encode(stream_id, DATA, 0, b"not for a unary call"))
        broken = await raw.answers(2)
        assert {broken[1].status.code, broken[5].status.code} == {Status.INVALID_ARGUMENT}
        assert not gate.cancelled
        gate.open.set()
        assert StringValue.FromString((await raw.answers(1))[3].payload).value == "HI"


async def test_a_client_that_goes_away_cancels_it(serve: Any, until: Any) -> None:
    gate = Gate()
    async with serve({"Say": gate}, shared=["Say"]) as served:
        async with served.raw() as raw:
            for stream_id in (1, 3):
                await raw.request(stream_id, "Say")
            await served.until_calls(1)
        await until(lambda: gate.cancelled == [""])


async def test_shutdown_lets_all_be_answered(serve: Any) -> None:
    gate = Gate()
    async with serve({"Say": gate}, shared=["Say"]) as served, served.raw() as raw:
        for stream_id in (1, 3):
            await raw.request(stream_id, "Say", "hi")
        await served.until_calls(1)
        served.server.close(5)
        await raw.request(5, "Say", "hi")
        assert (await raw.answers(1))[5].status.code == Status.UNAVAILABLE
        gate.open.set()
        assert sorted(await raw.answers(2)) == [1, 3]


async def test_a_vital_request_is_not_refused_and_does_not_count(calling: Any, until: Any) -> None:
    gate = Gate()
    async with (
        calling({"Say": gate, "Other": gate}, vital=["Other"], max_calls=2) as caller,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(caller.other)
        await caller.served.until_calls(1)
        for _ in range(3):
            tasks.start_soon(caller.ask)
        await until(lambda: caller.outcomes == [Status.RESOURCE_EXHAUSTED])
        tasks.start_soon(caller.other)
        await caller.served.until_calls(4)
        gate.open.set()
    assert caller.outcomes[1:] == ["HI"] * 2


async def test_only_unary_methods_that_there_are_can_be_shared(
    descriptor: ServiceDescriptor,
) -> None:
    async def nothing(_: Context, __: StringValue) -> None:
        return None

    with raises(LocalProtocolError, match="streams"):
        Service(descriptor, {"Count": nothing}, shared=["Count"])
    with raises(LocalProtocolError, match="no such method"):
        Service(descriptor, {}, vital=["Nothing"])
