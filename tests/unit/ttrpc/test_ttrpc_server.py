"""The server on a real socket: what its clients see, whatever its handlers do."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from api.errors import NvshimError, Status
from api.proto import ttrpc_pb2
from api.ttrpc import (
    ConnectFailed,
    ConnectionClosed,
    Context,
    DeadlineExceeded,
    LocalProtocolError,
    RemoteError,
    Service,
)
from api.ttrpc.client import Client, connect
from api.ttrpc.frames import DATA_MAX, REQUEST, encode
from tests.harness.examples import seeds

pytestmark = pytest.mark.anyio

LARGE = "x" * (3 << 20)


class OutOfCheese(NvshimError):
    """A typed failure of a handler."""

    code = "NVSHIM-E9999"
    status = Status.FAILED_PRECONDITION


async def echo(_: Context, request: StringValue) -> StringValue:
    return StringValue(value=request.value)


async def _say(client: Any, service: str, text: str = "hi", **options: Any) -> str:
    answer = await client.call(service, "Say", StringValue(value=text), StringValue, **options)
    return str(answer.value)


async def test_a_request_is_answered(serve: Any, service: str) -> None:
    async with serve({"Say": echo}) as served, connect(served.path) as client:
        assert await _say(client, service, "hello") == "hello"


async def test_an_address_may_be_written_as_a_url(serve: Any, service: str) -> None:
    async with serve({"Say": echo}) as served, connect(f"unix://{served.path}") as client:
        assert await _say(client, service) == "hi"


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
                assert [await _say(client, name, name) for name in names] == list(names)
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
                said = [await _say(client, name) for name in ("one", "one", "two")]
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
        await _say(client, service, timeout=5, metadata=metadata)
        await _say(client, service)
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
        assert await _say(client, service) == "hi"


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
        assert await _say(client, service) == "hi"
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
            answers[number] = await _say(client, service, str(number))

        async with anyio.create_task_group() as tasks:
            for number in range(1000):
                tasks.start_soon(ask, number)
    assert answers == {number: str(number) for number in range(1000)}


async def test_a_typed_error_travels_with_its_status_and_its_line(serve: Any, service: str) -> None:
    async def fail(_: Context, request: StringValue) -> StringValue:
        raise OutOfCheese("cheddar", found="an empty shelf", do="try the next shop")

    async with serve({"Say": fail}) as served, connect(served.path) as client:
        with pytest.raises(RemoteError) as caught:
            await _say(client, service)
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
            await _say(client, service)
        assert caught.value.status == Status.FAILED_PRECONDITION


async def test_an_answer_of_another_server_is_passed_on_as_it_was(serve: Any, service: str) -> None:
    detail = AnyMessage(type_url="why", value=b"because")

    async def fail(_: Context, request: StringValue) -> StringValue:
        raise RemoteError("x/Y", status=Status.DATA_LOSS, message="all gone", details=[detail])

    async with serve({"Say": fail}) as served, connect(served.path) as client:
        with pytest.raises(RemoteError) as caught:
            await _say(client, service)
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
            await _say(client, service)
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
            await _say(client, service)
        assert caught.value.status == Status.INTERNAL
        assert len(served.log) == 1


async def test_a_cancellation_that_escapes_a_handler_is_an_answer_too(
    serve: Any, service: str
) -> None:
    async def fail(_: Context, request: StringValue) -> StringValue:
        raise anyio.get_cancelled_exc_class()

    async with serve({"Say": fail}) as served, connect(served.path) as client:
        with anyio.fail_after(5), pytest.raises(RemoteError) as caught:
            await _say(client, service)
        assert caught.value.status == Status.INTERNAL


async def test_a_payload_that_is_no_message_is_the_clients_fault(serve: Any, service: str) -> None:
    async with serve({"Say": echo}) as served, served.raw() as raw:
        await raw.request(1, "Say", payload=b"\xff\xff")
        response = (await raw.answers(1))[1]
        assert response.status.code == Status.INVALID_ARGUMENT
        assert "google.protobuf.StringValue" in response.status.message
        assert served.log == []


async def test_the_clients_timeout_cancels_the_handler_and_is_answered(
    serve: Any, service: str
) -> None:
    cancelled = anyio.Event()

    async def hang(_: Context, request: StringValue) -> StringValue:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()
        return request

    # Without a client of ours, which would have a deadline of its own.
    async with serve({"Say": hang}) as served, served.raw() as raw:
        await raw.request(1, "Say", timeout_nano=30_000_000)
        response = (await raw.answers(1))[1]
        assert response.status.code == Status.DEADLINE_EXCEEDED
        assert "0.03 s" in response.status.message
        assert cancelled.is_set()


async def test_a_negative_timeout_is_over_at_once(serve: Any, service: str) -> None:
    async def hang(_: Context, request: StringValue) -> StringValue:
        await anyio.sleep_forever()
        return request

    async with serve({"Say": hang}) as served, served.raw() as raw:
        await raw.request(1, "Say", timeout_nano=-1)
        response = (await raw.answers(1))[1]
        assert response.status.code == Status.DEADLINE_EXCEEDED


async def test_a_client_that_goes_away_cancels_its_handlers_and_nobody_elses(
    serve: Any, service: str, until: Any
) -> None:
    ended: list[str] = []
    release = anyio.Event()

    async def wait(_: Context, request: StringValue) -> StringValue:
        try:
            await release.wait()
        except anyio.get_cancelled_exc_class():
            ended.append(request.value)
            raise
        return request

    async with (
        serve({"Say": wait}) as served,
        connect(served.path) as staying,
        anyio.create_task_group() as tasks,
    ):

        async def stay() -> None:
            assert await _say(staying, service, "staying") == "staying"

        tasks.start_soon(stay)
        async with connect(served.path) as going, anyio.create_task_group() as calls:
            calls.start_soon(_say, going, service, "going")
            await served.until_calls(2)
            calls.cancel_scope.cancel()
        await until(lambda: ended)
        release.set()
    assert ended == ["going"]


async def test_what_is_shielded_is_finished_although_the_client_is_gone(
    serve: Any, service: str
) -> None:
    finished = anyio.Event()

    async def careful(_: Context, request: StringValue) -> StringValue:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.05)
            finished.set()
        return request

    async with serve({"Say": careful}) as served:
        async with served.raw() as raw:
            await raw.request(1, "Say")
            await served.until_calls(1)
        with anyio.fail_after(20):
            await finished.wait()


async def test_a_shielded_method_is_finished_though_its_client_is_gone_or_its_time_is_over(
    serve: Any, service: str
) -> None:
    finished: list[str] = []

    async def careful(_: Context, request: StringValue) -> StringValue:
        await anyio.sleep(0.05)
        finished.append(request.value)
        return request

    async with serve({"Say": careful}, shielded=["Say"]) as served:
        async with served.raw() as raw:
            await raw.request(1, "Say", "late", timeout_nano=1_000_000)
            (answer,) = (await raw.answers(1)).values()
            assert StringValue.FromString(answer.payload).value == "late"
            await raw.request(3, "Say", "gone")
            await served.until_calls(2)
        with anyio.fail_after(20):
            while len(finished) < 2:  # noqa: ASYNC110 - the client has gone
                await anyio.sleep(0.01)
    assert finished == ["late", "gone"]


async def test_a_service_may_have_typed_errors_for_what_its_handlers_raise(
    serve: Any, service: str
) -> None:
    def translate(error: BaseException, context: Context, request: Any) -> NvshimError | None:
        if not isinstance(error, OSError):
            return None
        return OutOfCheese(f"{context.method} {request.value}", found=str(error))

    async def fail(_: Context, request: StringValue) -> StringValue:
        raise OSError("no cheese") if request.value == "x" else ValueError("a bug")

    def fail_at_once(_: Context, request: StringValue) -> StringValue:
        raise OSError("no cheese")

    served = serve({"Say": fail}, immediate={"Other": fail_at_once}, translate=translate)
    async with served as server, connect(server.path) as client:
        for method in ("Say", "Other"):
            with pytest.raises(RemoteError) as caught:
                await client.call(service, method, StringValue(value="x"), StringValue)
            assert caught.value.status == Status.FAILED_PRECONDITION
            assert f"{method} x: no cheese" in caught.value.message
        assert server.log == []
        with pytest.raises(RemoteError) as caught:
            await _say(client, service)
        assert caught.value.status == Status.INTERNAL
        assert [event for event, _ in server.log] == ["a handler failed"]


async def test_a_connection_that_breaks_in_a_frame_is_logged_and_forgotten(
    serve: Any, service: str, until: Any
) -> None:
    async with serve({"Say": echo}) as served:
        async with served.raw() as raw:
            await raw.send(b"\0\0\0\x05\0\0")
        async with connect(served.path) as client:
            assert await _say(client, service) == "hi"
        await until(lambda: [event for event, _ in served.log] == ["a client broke off"])


async def test_an_oversized_request_is_refused_and_the_connection_lives_on(
    serve: Any, service: str
) -> None:
    length = DATA_MAX + 1
    async with serve({"Say": echo}) as served, served.raw() as raw:
        await raw.send(length.to_bytes(4, "big") + encode(1, REQUEST, 0)[4:] + bytes(length))
        await raw.request(3, "Say", "and on it goes")
        answers = await raw.answers(2)
        assert answers[1].status.code == Status.RESOURCE_EXHAUSTED
        assert str(length) in answers[1].status.message
        assert StringValue.FromString(answers[3].payload).value == "and on it goes"


async def test_an_oversized_response_is_an_answer_too(serve: Any, service: str) -> None:
    async def much(_: Context, request: StringValue) -> StringValue:
        return StringValue(value="x" * DATA_MAX)

    async with serve({"Say": much, "Other": echo}) as served, connect(served.path) as client:
        with pytest.raises(RemoteError) as caught:
            await _say(client, service)
        assert caught.value.status == Status.RESOURCE_EXHAUSTED
        await client.call(service, "Other", StringValue(), StringValue)


async def test_requests_beyond_the_limit_are_refused_and_the_others_answered(
    serve: Any, service: str, until: Any
) -> None:
    release = anyio.Event()

    async def wait(_: Context, request: StringValue) -> StringValue:
        await release.wait()
        return request

    outcomes: list[object] = []
    async with serve({"Say": wait}, max_calls=3) as served, connect(served.path) as client:

        async def ask() -> None:
            try:
                outcomes.append(await _say(client, service))
            except RemoteError as error:
                outcomes.append(error.status)

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(ask)
            await until(lambda: outcomes == [Status.RESOURCE_EXHAUSTED] * 2)
            release.set()
    assert outcomes[2:] == ["hi"] * 3


async def test_large_requests_beyond_the_limit_are_refused(
    serve: Any, service: str, until: Any
) -> None:
    release = anyio.Event()

    async def wait(_: Context, request: StringValue) -> StringValue:
        await release.wait()
        return StringValue()

    statuses: list[int] = []
    async with serve({"Say": wait}) as served, connect(served.path) as client:

        async def ask() -> None:
            try:
                await _say(client, service, LARGE)
                statuses.append(Status.OK)
            except RemoteError as error:
                statuses.append(error.status)

        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(ask)
            await until(lambda: len(statuses) == 4)
            release.set()
        # 16 MiB are held at most, and what exceeds them by one message.
        assert sorted(statuses) == [Status.OK] * 6 + [Status.RESOURCE_EXHAUSTED] * 4
        assert await _say(client, service, "and on it goes") == ""


async def test_a_client_that_does_not_read_holds_up_nobody_else(serve: Any, service: str) -> None:
    async def much(_: Context, request: StringValue) -> StringValue:
        return StringValue(value=LARGE)

    async with serve({"Say": much, "Other": echo}) as served, served.raw() as deaf:
        request = ttrpc_pb2.Request(service=service, method="Say").SerializeToString()
        sent = 0
        with anyio.move_on_after(0.5):
            while sent < 20_000:
                await deaf.send(b"".join(encode(sent * 2 + i * 2 + 1, REQUEST, 0, request)
                                         for i in range(100)))  # fmt: skip
                sent += 100
        # It is not read from any more, and no answers are made that it would not take.
        assert sent < 20_000
        assert served.calls < 5
        with anyio.fail_after(20):
            async with connect(served.path) as client:
                await client.call(service, "Other", StringValue(), StringValue)


async def test_a_slow_reader_gets_everything_in_the_end(serve: Any, service: str) -> None:
    async def much(_: Context, request: StringValue) -> StringValue:
        return StringValue(value=request.value + LARGE)

    async with serve({"Say": much}) as served, served.raw() as slow:
        for number in range(5):
            await slow.request(number * 2 + 1, "Say", str(number))
        await anyio.sleep(0.05)
        answers = {
            stream_id: StringValue.FromString(response.payload).value
            for stream_id, response in (await slow.answers(5)).items()
        }
    assert answers == {number * 2 + 1: str(number) + LARGE for number in range(5)}


async def test_shutdown_ends_idle_connections_at_once(serve: Any, service: str) -> None:
    async with serve({"Say": echo}) as served, connect(served.path) as client:
        await _say(client, service)
        began = time.monotonic()
        await served.server.shutdown(60)
        assert time.monotonic() - began < 20
        with anyio.fail_after(20):
            await client.wait_closed()
        with pytest.raises(ConnectionClosed):
            await _say(client, service)
        with pytest.raises(ConnectFailed):
            async with connect(served.path):
                pass
        with anyio.fail_after(20):
            await served.returned.wait()


async def test_shutdown_lets_requests_finish_and_begins_no_new_ones(
    serve: Any, service: str
) -> None:
    release = anyio.Event()

    async def wait(_: Context, request: StringValue) -> StringValue:
        await release.wait()
        return StringValue(value="finished")

    async with serve({"Say": wait}) as served, connect(served.path) as client:
        answers: list[str] = []

        async def ask() -> None:
            answers.append(await _say(client, service))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await served.until_calls(1)
            tasks.start_soon(served.server.shutdown, 10)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(RemoteError, match="shutting down") as caught:
                await _say(client, service)
            assert caught.value.status == Status.UNAVAILABLE
            release.set()
        assert answers == ["finished"]
        assert served.returned.is_set()


async def test_shutdown_waits_no_longer_than_its_grace(serve: Any, service: str) -> None:
    async def hang(_: Context, request: StringValue) -> StringValue:
        await anyio.sleep_forever()
        return request

    async with (
        serve({"Say": hang}) as served,
        connect(served.path) as client,
        anyio.create_task_group() as tasks,
    ):

        async def ask() -> None:
            with pytest.raises(ConnectionClosed):
                await _say(client, service)

        tasks.start_soon(ask)
        await served.until_calls(1)
        began = time.monotonic()
        await served.server.shutdown(0.1)
        assert 0.1 <= time.monotonic() - began < 20


async def test_a_second_shutdown_can_be_less_patient(serve: Any, service: str) -> None:
    async def hang(_: Context, request: StringValue) -> StringValue:
        await anyio.sleep_forever()
        return request

    async with serve({"Say": hang}) as served, served.raw() as raw:
        await raw.request(1, "Say")
        await served.until_calls(1)
        served.server.close(60)
        with anyio.fail_after(20):
            await served.server.shutdown(0)


async def test_a_handler_that_closes_the_server_is_answered(serve: Any, service: str) -> None:
    async def stop(_: Context, request: StringValue) -> StringValue:
        served.server.close()
        return StringValue(value="stopping " + LARGE)

    async with serve({"Say": stop}) as served, connect(served.path) as client:
        assert await _say(client, service) == "stopping " + LARGE
        with anyio.fail_after(20):
            await client.wait_closed()
            await served.returned.wait()


async def test_a_server_closed_before_it_serves_returns_at_once(
    tmp_path: Path, server_class: Any
) -> None:
    server = server_class([])
    await server.shutdown(1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        with anyio.fail_after(20):
            await server.serve(listener)
        assert listener.fileno() == -1


async def test_a_server_serves_one_listener_at_a_time(serve: Any, service: str) -> None:
    async with serve({"Say": echo}) as served, connect(served.path) as client:
        await _say(client, service)
        with socket.socket(socket.AF_UNIX) as listener, pytest.raises(LocalProtocolError):
            await served.server.serve(listener)


async def test_a_listener_that_fails_ends_the_server_with_its_error(
    tmp_path: Path, descriptor: ServiceDescriptor, server_class: Any
) -> None:
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(OSError, match="Invalid"):
        # Never told to listen: accept(2) says EINVAL.
        with anyio.fail_after(20):
            await server_class([Service(descriptor, {})]).serve(listener)


async def test_cancelling_serve_leaves_no_connection(
    tmp_path: Path, descriptor: ServiceDescriptor, service: str, server_class: Any
) -> None:
    path = str(tmp_path / "s")
    before = set(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server_class([Service(descriptor, {"Say": echo})]).serve, listener)
            async with connect(path) as client:
                await _say(client, service)
                tasks.cancel_scope.cancel()
    assert set(os.listdir("/proc/self/fd")) == before


async def test_many_connections_leave_nothing_behind(serve: Any, service: str, until: Any) -> None:
    async with serve({"Say": echo}) as served:
        await anyio.wait_all_tasks_blocked()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(200):
            async with connect(served.path) as client:
                await _say(client, service)
        await until(lambda: len(os.listdir("/proc/self/fd")) == before)


@pytest.mark.parametrize("seed", seeds(1))
async def test_hostile_bytes_disturb_nobody_else(serve: Any, service: str, seed: int) -> None:
    random = Random(seed)
    async with serve({"Say": echo}) as served, connect(served.path) as client:
        for _ in range(100):
            async with served.raw() as raw:
                for _ in range(random.randrange(5)):
                    kind = random.randrange(3)
                    if kind == 0:
                        await raw.send(random.randbytes(random.randrange(1, 300)))
                    elif kind == 1:
                        await raw.request(random.randrange(9), random.choice(("Say", "Oh")))
                    else:
                        data = random.randbytes(random.randrange(20))
                        await raw.send(
                            encode(
                                random.randrange(9), random.randrange(5), random.randrange(9), data
                            )
                        )
            assert await _say(client, service) == "hi"
        assert {event for event, _ in served.log} <= {"a client broke off"}


async def test_a_lack_of_file_descriptors_passes(serve: Any, service: str, until: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serve({"Say": echo}) as served:
        with socket.socket(socket.AF_UNIX) as late, contextlib.ExitStack() as restored:
            late.setblocking(False)
            top = max(map(int, os.listdir("/proc/self/fd"))) + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
            restored.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
            with contextlib.suppress(OSError):
                while True:
                    restored.callback(os.close, os.dup(0))
            late.connect(served.path)
            await until(lambda: "cannot accept a connection now" in [e for e, _ in served.log])
            restored.close()
            async with anyio.create_task_group() as tasks:
                client = Client(late, tasks)
                with anyio.fail_after(20):
                    assert await _say(client, service) == "hi"
                client.close()


async def test_a_bug_that_one_connection_meets_is_not_for_all_to_pay(
    serve: Any, service: str
) -> None:
    told: list[str] = []

    def log(event: str, fields: Any) -> None:
        told.append(event)
        if event == "a handler failed":
            raise RuntimeError("the log is full")

    async def fail(_: Context, request: StringValue) -> StringValue:
        raise ValueError

    async with (
        serve({"Say": echo, "Other": fail}, log=log) as served,
        connect(served.path) as client,
        connect(served.path) as unlucky,
    ):
        with anyio.fail_after(20), pytest.raises(ConnectionClosed):
            await unlucky.call(service, "Other", StringValue(), StringValue)
        assert await _say(client, service) == "hi"
        assert told == ["a handler failed", "a connection failed"]


async def test_a_deadline_is_not_for_what_comes_in_time(serve: Any, service: str) -> None:
    async with serve({"Say": echo}) as served, connect(served.path) as client:
        for _ in range(20):
            assert await _say(client, service, timeout=5) == "hi"
        with pytest.raises(DeadlineExceeded):
            await _say(client, service, timeout=0)
