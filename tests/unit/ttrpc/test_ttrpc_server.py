"""The server on a real socket, with all kinds of handlers."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import anyio
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from api.errors import Status
from api.ttrpc import Context, LocalProtocolError, RemoteError, Service
from api.ttrpc.client import connect
from tests.harness.raising import raises
from tests.unit.ttrpc.calls import NAME, Caller, Gate, OutOfCheese, echo

pytestmark = pytest.mark.anyio


async def test_an_address_may_be_written_as_a_url(serve: Any) -> None:
    async with serve({"Say": echo}) as served, connect(f"unix://{served.path}") as client:
        assert await Caller(client).say("hello") == "hello"


class _Counter:
    """An implementation of a bound service."""

    def __init__(self) -> None:
        self.count = 0

    async def say(self, _: Context, request: StringValue) -> StringValue:
        self.count += 1
        return StringValue(value=f"{request.value} {self.count}")

    def other(self, _: Context, request: StringValue) -> StringValue:
        return StringValue(value=str(self.count))


async def test_a_service_has_a_name_and_its_instances_own_state(
    tmp_path: Path, descriptor: ServiceDescriptor, server_class: Any
) -> None:
    path = str(tmp_path / "s")
    table = Service(descriptor, {"Say": _Counter.say}, immediate={"Other": _Counter.other})
    bound = [table.bind(_Counter()), table.bind(_Counter())]
    bound[0].name, bound[1].name = "one", "two"
    server = server_class([*bound, Service(descriptor, {"Say": echo}, name="a.v3.Echo")])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, listener)
            async with connect(path) as client:
                caller = Caller(client)
                names = ("one", "one", "two", "a.v3.Echo")
                said = [await caller.say(service=name) for name in names]
                assert said == ["hi 1", "hi 2", "hi 1", "hi"]
                assert await caller.say(service="one", method="Other") == "2"
            await server.shutdown(0)


def test_two_services_of_one_name_and_a_handler_for_no_method_are_mistakes(
    descriptor: ServiceDescriptor, server_class: Any
) -> None:
    with raises(LocalProtocolError, match="served already"):
        server_class([Service(descriptor, {}), Service(descriptor, {})])
    with raises(LocalProtocolError, match="Shout"):
        Service(descriptor, {"Say": echo, "Shout": echo})


@pytest.mark.parametrize("at_once", [False, True])
async def test_the_context_tells_about_the_call(calling: Any, *, at_once: bool) -> None:
    seen: list[Context] = []

    def look(context: Context, request: StringValue) -> StringValue:
        seen.append(context)
        return request

    async def look_in_a_task(context: Context, request: StringValue) -> StringValue:
        return look(context, request)

    handlers, immediate = ({}, {"Say": look}) if at_once else ({"Say": look_in_a_task}, {})
    metadata = (("trace", "1"), ("Trace", "2"), ("other", "3"))
    async with calling(handlers, immediate=immediate) as caller:
        assert await caller.say("hello", timeout=5, metadata=metadata) == "hello"
        await caller.say()
        now = anyio.current_time()
    with_timeout, without = seen
    assert (with_timeout.service, with_timeout.method) == (NAME, "Say")
    assert with_timeout.metadata == metadata
    assert with_timeout.values("TRACE") == ["1", "2"]
    assert with_timeout.timeout == 5
    assert with_timeout.deadline is not None
    assert 0 < with_timeout.deadline - now <= 5
    assert with_timeout.peer == (os.getpid(), os.geteuid(), os.getegid())
    assert (without.timeout, without.metadata) == (None, ())


async def test_a_slow_request_holds_up_nobody(calling: Any) -> None:
    slow = Gate()
    async with (
        calling({"Say": echo, "Other": slow}) as caller,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(caller.other)
        await caller.served.until_calls(1)
        assert await caller.say() == "hi"
        slow.open.set()


async def test_a_thousand_requests_at_once_each_get_their_own_answer(calling: Any) -> None:
    answers: dict[int, str] = {}

    async def reverse(_: Context, request: StringValue) -> StringValue:
        # Answers in another order than the requests.
        await anyio.sleep(0.001 * (int(request.value) % 7))
        return request

    async with calling({"Say": reverse}) as caller:

        async def ask(number: int) -> None:
            answers[number] = await caller.say(str(number))

        async with anyio.create_task_group() as tasks:
            for number in range(1000):
                tasks.start_soon(ask, number)
    assert answers == {number: str(number) for number in range(1000)}


async def _in_a_task_group() -> None:
    async def inner() -> None:
        raise OutOfCheese("brie", found="none")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(inner)


async def _cancelled() -> None:
    raise anyio.get_cancelled_exc_class()


BECAUSE = AnyMessage(type_url="why", value=b"because")
# What a handler raises, returns or does; the status that its caller gets; and what is logged.
FAILURES: dict[str, tuple[Any, int, str, str]] = {
    "typed": (
        OutOfCheese("cheddar", found="an empty shelf", do="try the next shop"),
        Status.FAILED_PRECONDITION,
        "NVSHIM-E9999 out-of-cheese: cheddar: an empty shelf. Try the next shop",
        "",
    ),
    "typed, from a task group": (_in_a_task_group, Status.FAILED_PRECONDITION, "brie", ""),
    "of another server": (
        RemoteError("x/Y", status=Status.DATA_LOSS, message="all gone", details=[BECAUSE]),
        Status.DATA_LOSS,
        "all gone",
        "",
    ),
    "a bug": (ValueError("two\nlines"), Status.INTERNAL, "ValueError: two lines", "in fail"),
    "nothing": (None, Status.INTERNAL, "not StringValue", "not StringValue"),
    "another message": (Int32Value(value=1), Status.INTERNAL, "not StringValue", "Int32Value"),
    "a text": ("text", Status.INTERNAL, "not StringValue", "str"),
    "a cancellation that escapes": (_cancelled, Status.INTERNAL, "", "ancel"),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_failure_is_one_line_with_its_status_and_a_bug_is_logged(
    calling: Any, name: str
) -> None:
    failure, status, words, logged = FAILURES[name]

    async def fail(_: Context, request: StringValue) -> Any:
        if isinstance(failure, Exception):
            raise failure
        return await failure() if callable(failure) else failure

    async with calling({"Say": fail, "Other": echo}) as caller:
        with anyio.fail_after(20), pytest.raises(RemoteError) as caught:
            await caller.say()
        assert caught.value.status == status
        assert words in caught.value.message
        assert "\n" not in caught.value.message
        assert caught.value.details == getattr(failure, "details", ())
        assert [event for event, _ in caller.served.log] == (["a handler failed"] if logged else [])
        assert all(fields["method"] == f"{NAME}/Say" for _, fields in caller.served.log)
        assert all(logged in fields["traceback"] for _, fields in caller.served.log)
        assert await caller.other() == "hi"


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ({"method": "Other"}, "method Other"),
        ({"method": "Missing"}, "method Missing"),
        ({"service": "no.such.Service"}, "service no.such.Service"),
    ],
)
async def test_what_has_no_handler_is_unimplemented(
    calling: Any, method: dict[str, str], named: str
) -> None:
    async with calling({"Say": echo}) as caller:
        with pytest.raises(RemoteError) as caught:
            await caller.say(**method)
        assert caught.value.status == Status.UNIMPLEMENTED
        assert named in caught.value.message
        assert method.get("service", NAME) in caught.value.message
        assert await caller.say() == "hi"


async def test_a_payload_that_is_no_message_is_the_clients_fault(serve: Any) -> None:
    async with serve({"Say": echo}) as served, served.raw() as raw:
        await raw.request(1, "Say", payload=b"\xff\xff")
        response = (await raw.answers(1))[1]
        assert response.status.code == Status.INVALID_ARGUMENT
        assert "google.protobuf.StringValue" in response.status.message
        assert served.log == []
