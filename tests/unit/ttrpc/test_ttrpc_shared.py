"""Methods whose equal requests are one call, and methods that are never refused."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.wrappers_pb2 import StringValue

from api.errors import NvshimError, Status
from api.ttrpc import Context, LocalProtocolError, RemoteError, Service
from api.ttrpc.client import Client, connect
from api.ttrpc.frames import DATA, encode

pytestmark = pytest.mark.anyio


class Broken(NvshimError):
    """A typed failure of a handler."""

    code = "NVSHIM-E9997"
    status = Status.ABORTED


class _Gate:
    """A handler that answers when it is let, and fails if it is told to."""

    def __init__(self) -> None:
        self.open = anyio.Event()
        self.failure: Exception | None = None
        self.cancelled = 0

    async def __call__(self, _: Context, request: StringValue) -> StringValue:
        try:
            await self.open.wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise
        if self.failure is not None:
            raise self.failure
        return StringValue(value=request.value.upper())


class _Asker:
    """Asks, any number of times at once."""

    def __init__(self, client: Client, service: str) -> None:
        self.outcomes: list[object] = []
        self._client = client
        self._service = service

    async def ask(self, text: str = "hi", timeout: float | None = None) -> None:
        try:
            answer = await self._client.call(
                self._service, "Say", StringValue(value=text), StringValue, timeout=timeout
            )
            self.outcomes.append(answer.value)
        except RemoteError as error:
            self.outcomes.append(error.status)

    async def until_heard(self) -> None:
        """Wait until the server has read all that was asked before."""
        await self._client.call(self._service, "Other", StringValue(), StringValue)


def _other(_: Context, request: StringValue) -> StringValue:
    return request


async def test_equal_requests_are_one_call_and_all_are_answered(serve: Any, service: str) -> None:
    gate = _Gate()
    async with (
        serve({"Say": gate}, immediate={"Other": _other}, shared=["Say"], max_calls=1) as served,
        connect(served.path) as client,
        anyio.create_task_group() as tasks,
    ):
        asker = _Asker(client, service)
        for text in ("hi",) * 200 + ("ho",) * 200:
            tasks.start_soon(asker.ask, text)
        await served.until_calls(2)
        await asker.until_heard()
        assert served.calls == 2
        gate.open.set()
    assert sorted(map(str, asker.outcomes)) == ["HI"] * 200 + ["HO"] * 200


async def test_who_sets_a_timeout_has_a_call_of_its_own(serve: Any, service: str) -> None:
    gate = _Gate()
    async with (
        serve({"Say": gate}, immediate={"Other": _other}, shared=["Say"], max_calls=1) as served,
        connect(served.path) as client,
        anyio.create_task_group() as tasks,
    ):
        asker = _Asker(client, service)
        tasks.start_soon(asker.ask)
        await served.until_calls(1)
        with pytest.raises(NvshimError) as caught:
            await asker.ask(timeout=0.01)
        assert caught.value.status == Status.DEADLINE_EXCEEDED
        assert served.calls == 2
        gate.open.set()
    assert asker.outcomes == ["HI"]


async def test_each_connection_has_its_own_and_the_next_request_its_own_answer(
    serve: Any, service: str
) -> None:
    gate = _Gate()
    async with (
        serve({"Say": gate}, shared=["Say"]) as served,
        connect(served.path) as one,
        connect(served.path) as another,
    ):
        first, second = _Asker(one, service), _Asker(another, service)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first.ask)
            tasks.start_soon(second.ask)
            await served.until_calls(2)
            gate.open.set()
        gate.failure = Broken("to say", found="a sore throat")
        await first.ask()
    assert (first.outcomes, second.outcomes) == (["HI", Status.ABORTED], ["HI"])


async def test_a_failure_is_everybodys(serve: Any, service: str) -> None:
    gate = _Gate()
    gate.failure = Broken("to say", found="a sore throat")
    async with (
        serve({"Say": gate}, immediate={"Other": _other}, shared=["Say"]) as served,
        connect(served.path) as client,
        anyio.create_task_group() as tasks,
    ):
        asker = _Asker(client, service)
        for _ in range(3):
            tasks.start_soon(asker.ask)
        await served.until_calls(1)
        await asker.until_heard()
        gate.open.set()
    assert asker.outcomes == [Status.ABORTED] * 3


async def test_a_stream_that_its_client_breaks_is_answered_alone(serve: Any) -> None:
    gate = _Gate()
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
    gate = _Gate()
    async with serve({"Say": gate}, shared=["Say"]) as served:
        async with served.raw() as raw:
            for stream_id in (1, 3):
                await raw.request(stream_id, "Say")
            await served.until_calls(1)
        await until(lambda: gate.cancelled == 1)


async def test_shutdown_lets_all_be_answered(serve: Any) -> None:
    gate = _Gate()
    async with serve({"Say": gate}, shared=["Say"]) as served, served.raw() as raw:
        for stream_id in (1, 3):
            await raw.request(stream_id, "Say", "hi")
        await served.until_calls(1)
        served.server.close(5)
        await raw.request(5, "Say", "hi")
        assert (await raw.answers(1))[5].status.code == Status.UNAVAILABLE
        gate.open.set()
        assert sorted(await raw.answers(2)) == [1, 3]


async def test_a_vital_request_is_not_refused_and_does_not_count(
    serve: Any, service: str, until: Any
) -> None:
    gate = _Gate()

    async def vital(_: Context, request: StringValue) -> StringValue:
        await gate.open.wait()
        return request

    async with (
        serve({"Say": gate, "Other": vital}, vital=["Other"], max_calls=2) as served,
        connect(served.path) as client,
        anyio.create_task_group() as tasks,
    ):
        asker = _Asker(client, service)
        tasks.start_soon(asker.until_heard)
        await served.until_calls(1)
        for _ in range(3):
            tasks.start_soon(asker.ask)
        await until(lambda: asker.outcomes == [Status.RESOURCE_EXHAUSTED])
        tasks.start_soon(asker.until_heard)
        await served.until_calls(4)
        gate.open.set()
    assert asker.outcomes[1:] == ["HI"] * 2


async def test_only_unary_methods_that_there_are_can_be_shared(
    descriptor: ServiceDescriptor,
) -> None:
    async def nothing(_: Context, __: StringValue) -> None:
        return None

    with pytest.raises(LocalProtocolError, match="streams"):
        Service(descriptor, {"Count": nothing}, shared=["Count"])
    with pytest.raises(LocalProtocolError, match="no such method"):
        Service(descriptor, {}, vital=["Nothing"])
