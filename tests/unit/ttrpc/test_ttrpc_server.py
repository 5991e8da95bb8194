"""The server on a real socket: what its clients see, whatever its handlers do."""

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
from api.ttrpc import (
    Context,
    LocalProtocolError,
    RemoteError,
    Service,
)
from api.ttrpc.client import connect
from tests.unit.ttrpc.calls import OutOfCheese, echo, say

pytestmark = pytest.mark.anyio


async def test_a_request_is_answered(serve: Any, service: str) -> None:
    async with serve({"Say": echo}) as served, connect(served.path) as client:
        assert await say(client, service, "hello") == "hello"


async def test_an_address_may_be_written_as_a_url(serve: Any, service: str) -> None:
    async with serve({"Say": echo}) as served, connect(f"unix://{served.path}") as client:
        assert await say(client, service) == "hi"


async def test_one_descriptor_is_served_under_two_names(
    tmp_path: Path, descriptor: ServiceDescriptor, server_class: Any
) -> None:
    path = str(tmp_path / "s")
    names = ("a.v2.Echo", "a.v3.Echo")
    server = server_class([Service(descriptor, {"Say": echo}, name=name) for name in names])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, listener)
            async with connect(path) as client:
                assert [await say(client, name, name) for name in names] == list(names)
            await server.shutdown(0)


class _Counter:
    """What a bound service calls."""

    def __init__(self) -> None:
        self.count = 0

    async def say(self, _: Context, request: StringValue) -> StringValue:
        self.count += 1
        return StringValue(value=f"{request.value} {self.count}")

    def other(self, _: Context, request: StringValue) -> StringValue:
        return StringValue(value=str(self.count))


async def test_a_service_of_a_classs_functions_is_bound_to_its_instances(
    tmp_path: Path, descriptor: ServiceDescriptor, server_class: Any
) -> None:
    path = str(tmp_path / "s")
    table = Service(descriptor, {"Say": _Counter.say}, immediate={"Other": _Counter.other})
    services = [table.bind(_Counter()), table.bind(_Counter())]
    services[0].name, services[1].name = "one", "two"
    server = server_class(services)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, listener)
            async with connect(path) as client:
                said = [await say(client, name) for name in ("one", "one", "two")]
                assert said == ["hi 1", "hi 2", "hi 1"]
                answer = await client.call("one", "Other", StringValue(), StringValue)
                assert answer.value == "2"
            await server.shutdown(0)


def test_two_services_of_one_name_are_a_mistake(
    descriptor: ServiceDescriptor, server_class: Any
) -> None:
    with pytest.raises(LocalProtocolError, match="served already"):
        server_class([Service(descriptor, {}), Service(descriptor, {})])


def test_a_handler_for_no_method_is_a_mistake(descriptor: ServiceDescriptor) -> None:
    with pytest.raises(LocalProtocolError, match="Shout"):
        Service(descriptor, {"Say": echo, "Shout": echo})


async def test_the_context_tells_about_the_call(serve: Any, service: str) -> None:
    seen: list[Context] = []

    async def look(context: Context, request: StringValue) -> StringValue:
        seen.append(context)
        return request

    metadata = (("trace", "1"), ("Trace", "2"), ("other", "3"))
    async with serve({"Say": look}) as served, connect(served.path) as client:
        await say(client, service, timeout=5, metadata=metadata)
        await say(client, service)
        now = anyio.current_time()
    with_timeout, without = seen
    assert (with_timeout.service, with_timeout.method) == (service, "Say")
    assert with_timeout.metadata == metadata
    assert with_timeout.values("TRACE") == ["1", "2"]
    assert with_timeout.timeout == 5
    assert 0 < with_timeout.deadline - now <= 5
    assert with_timeout.peer == (os.getpid(), os.geteuid(), os.getegid())
    assert (without.timeout, without.metadata) == (None, ())


@pytest.mark.parametrize(
    ("method", "named"), [("Other", "method Other"), ("Missing", "method Missing")]
)
async def test_a_method_without_a_handler_is_unimplemented(
    serve: Any, service: str, method: str, named: str
) -> None:
    async with serve({"Say": echo}) as served, connect(served.path) as client:
        with pytest.raises(RemoteError) as caught:
            await client.call(service, method, StringValue(), StringValue)
        assert caught.value.status == Status.UNIMPLEMENTED
        assert named in caught.value.message
        assert service in caught.value.message
        assert await say(client, service) == "hi"


async def test_an_unknown_service_is_unimplemented(serve: Any) -> None:
    async with serve({"Say": echo}) as served, connect(served.path) as client:
        with pytest.raises(RemoteError) as caught:
            await client.call("no.such.Service", "Say", StringValue(), StringValue)
        assert caught.value.status == Status.UNIMPLEMENTED
        assert "service no.such.Service" in caught.value.message


async def test_a_slow_request_holds_up_nobody(serve: Any, service: str) -> None:
    release = anyio.Event()

    async def slow(_: Context, request: StringValue) -> StringValue:
        await release.wait()
        return request

    async with (
        serve({"Say": echo, "Other": slow}) as served,
        connect(served.path) as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(client.call, service, "Other", StringValue(), StringValue)
        await served.until_calls(1)
        assert await say(client, service) == "hi"
        release.set()


async def test_a_thousand_requests_at_once_each_get_their_own_answer(
    serve: Any, service: str
) -> None:
    answers: dict[int, str] = {}

    async def reverse(_: Context, request: StringValue) -> StringValue:
        # Answers in another order than that of the requests.
        await anyio.sleep(0.001 * (int(request.value) % 7))
        return request

    async with serve({"Say": reverse}) as served, connect(served.path) as client:

        async def ask(number: int) -> None:
            answers[number] = await say(client, service, str(number))

        async with anyio.create_task_group() as tasks:
            for number in range(1000):
                tasks.start_soon(ask, number)
    assert answers == {number: str(number) for number in range(1000)}


async def test_a_typed_error_travels_with_its_status_and_its_line(serve: Any, service: str) -> None:
    async def fail(_: Context, request: StringValue) -> StringValue:
        raise OutOfCheese("cheddar", found="an empty shelf", do="try the next shop")

    async with serve({"Say": fail}) as served, connect(served.path) as client:
        with pytest.raises(RemoteError) as caught:
            await say(client, service)
        assert caught.value.status == Status.FAILED_PRECONDITION
        assert caught.value.message == (
            "NVSHIM-E9999 out-of-cheese: cheddar: an empty shelf. Try the next shop"
        )
        assert served.log == []


async def test_a_typed_error_from_a_task_group_is_not_wrapped(serve: Any, service: str) -> None:
    async def fail(_: Context, request: StringValue) -> StringValue:
        async def inner() -> None:
            raise OutOfCheese("brie", found="none")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(inner)
        return request

    async with serve({"Say": fail}) as served, connect(served.path) as client:
        with pytest.raises(RemoteError, match="brie") as caught:
            await say(client, service)
        assert caught.value.status == Status.FAILED_PRECONDITION


async def test_an_answer_of_another_server_is_passed_on_as_it_was(serve: Any, service: str) -> None:
    detail = AnyMessage(type_url="why", value=b"because")

    async def fail(_: Context, request: StringValue) -> StringValue:
        raise RemoteError("x/Y", status=Status.DATA_LOSS, message="all gone", details=[detail])

    async with serve({"Say": fail}) as served, connect(served.path) as client:
        with pytest.raises(RemoteError) as caught:
            await say(client, service)
        assert caught.value.status == Status.DATA_LOSS
        assert caught.value.message == "all gone"
        assert caught.value.details == (detail,)


async def test_any_other_exception_is_one_line_of_internal_and_a_logged_traceback(
    serve: Any, service: str
) -> None:
    async def fail(_: Context, request: StringValue) -> StringValue:
        raise ValueError("two\nlines")

    async with serve({"Say": fail}) as served, connect(served.path) as client:
        with pytest.raises(RemoteError) as caught:
            await say(client, service)
        assert caught.value.status == Status.INTERNAL
        assert "ValueError: two lines" in caught.value.message
        assert "\n" not in caught.value.message
        ((event, fields),) = served.log
        assert event == "a handler failed"
        assert fields["method"] == f"{service}/Say"
        assert "in fail" in fields["traceback"]


@pytest.mark.parametrize("wrong", [None, Int32Value(value=1), "text"])
async def test_a_handler_that_returns_something_else_has_failed(
    serve: Any, service: str, wrong: Any
) -> None:
    async def fail(_: Context, request: StringValue) -> Any:
        return wrong

    async with serve({"Say": fail}) as served, connect(served.path) as client:
        with pytest.raises(RemoteError, match="not StringValue") as caught:
            await say(client, service)
        assert caught.value.status == Status.INTERNAL
        assert len(served.log) == 1


async def test_a_cancellation_that_escapes_a_handler_is_an_answer_too(
    serve: Any, service: str
) -> None:
    async def fail(_: Context, request: StringValue) -> StringValue:
        raise anyio.get_cancelled_exc_class()

    async with serve({"Say": fail}) as served, connect(served.path) as client:
        with anyio.fail_after(5), pytest.raises(RemoteError) as caught:
            await say(client, service)
        assert caught.value.status == Status.INTERNAL


async def test_a_payload_that_is_no_message_is_the_clients_fault(serve: Any, service: str) -> None:
    async with serve({"Say": echo}) as served, served.raw() as raw:
        await raw.request(1, "Say", payload=b"\xff\xff")
        response = (await raw.answers(1))[1]
        assert response.status.code == Status.INVALID_ARGUMENT
        assert "google.protobuf.StringValue" in response.status.message
        assert served.log == []
