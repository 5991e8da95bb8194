"""Clients that disconnect, are slow, hostile or too many, and slow handlers."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.wrappers_pb2 import StringValue

from api.errors import NvshimError, Status
from api.proto import ttrpc_pb2
from api.ttrpc import (
    ConnectionClosed,
    Context,
    DeadlineExceeded,
    RemoteError,
    Service,
)
from api.ttrpc.client import Client, connect
from api.ttrpc.frames import DATA_MAX, REQUEST, encode
from tests.harness.examples import seeds
from tests.harness.own_process import restored
from tests.harness.raising import raises
from tests.unit.ttrpc.calls import LARGE, NAME, Caller, Gate, OutOfCheese, echo

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("timeout", "told"), [(30_000_000, "0.03 s"), (-1, "")])
async def test_the_clients_timeout_cancels_the_handler_and_is_answered(
    serve: Any, timeout: int, told: str
) -> None:
    gate = Gate()
    # Without our own client, which would have its own deadline.
    async with serve({"Say": gate}) as served, served.raw() as raw:
        await raw.request(1, "Say", timeout_nano=timeout)
        response = (await raw.answers(1))[1]
        assert response.status.code == Status.DEADLINE_EXCEEDED
        assert told in response.status.message
        assert gate.cancelled == [""]


async def test_a_client_that_goes_away_cancels_its_handlers_and_nobody_elses(
    calling: Any, until: Any
) -> None:
    gate = Gate()
    async with (
        calling({"Say": gate}) as staying,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(staying.ask, "staying")
        async with connect(staying.served.path) as going, anyio.create_task_group() as calls:
            calls.start_soon(Caller(going).say, "going")
            await staying.served.until_calls(2)
            calls.cancel_scope.cancel()
        await until(lambda: gate.cancelled)
        gate.open.set()
    assert (gate.cancelled, staying.outcomes) == (["going"], ["STAYING"])


async def test_what_is_shielded_is_finished_although_the_client_is_gone(serve: Any) -> None:
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
    serve: Any,
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


async def test_a_service_may_have_typed_errors_for_what_its_handlers_raise(serve: Any) -> None:
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
                await client.call(NAME, method, StringValue(value="x"), StringValue)
            assert caught.value.status == Status.FAILED_PRECONDITION
            assert f"{method} x: no cheese" in caught.value.message
        assert server.log == []
        with pytest.raises(RemoteError) as caught:
            await Caller(client).say()
        assert caught.value.status == Status.INTERNAL
        assert [event for event, _ in server.log] == ["a handler failed"]


async def test_a_connection_that_breaks_in_a_frame_is_logged_and_forgotten(
    serve: Any, until: Any
) -> None:
    async with serve({"Say": echo}) as served:
        async with served.raw() as raw:
            await raw.send(b"\0\0\0\x05\0\0")
        async with connect(served.path) as client:
            assert await Caller(client).say() == "hi"
        await until(lambda: [event for event, _ in served.log] == ["a client broke off"])


async def test_an_oversized_request_is_refused_and_the_connection_lives_on(serve: Any) -> None:
    length = DATA_MAX + 1
    async with serve({"Say": echo}) as served, served.raw() as raw:
        await raw.send(length.to_bytes(4, "big") + encode(1, REQUEST, 0)[4:] + bytes(length))
        await raw.request(3, "Say", "and on it goes")
        answers = await raw.answers(2)
        assert answers[1].status.code == Status.RESOURCE_EXHAUSTED
        assert str(length) in answers[1].status.message
        assert StringValue.FromString(answers[3].payload).value == "and on it goes"


async def test_an_oversized_response_is_an_answer_too(calling: Any) -> None:
    async def much(_: Context, request: StringValue) -> StringValue:
        return StringValue(value="x" * DATA_MAX)

    async with calling({"Say": much, "Other": echo}) as caller:
        await caller.ask()
        assert caller.outcomes == [Status.RESOURCE_EXHAUSTED]
        await caller.other()


@pytest.mark.parametrize(
    ("text", "asked", "refused", "limit"),
    # At most 16 MiB are buffered, plus one message.
    [("hi", 5, 2, {"max_calls": 3}), (LARGE, 10, 4, {})],
    ids=["many", "large"],
)
async def test_requests_beyond_the_limit_are_refused_and_the_others_answered(
    calling: Any, until: Any, text: str, asked: int, refused: int, limit: dict[str, int]
) -> None:
    gate = Gate()
    async with calling({"Say": gate}, **limit) as caller:
        async with anyio.create_task_group() as tasks:
            for _ in range(asked):
                tasks.start_soon(caller.ask, text)
            await until(lambda: caller.outcomes == [Status.RESOURCE_EXHAUSTED] * refused)
            gate.open.set()
        assert caller.outcomes[refused:] == [text.upper()] * (asked - refused)
        assert await caller.say("and on it goes") == "AND ON IT GOES"


async def test_a_client_that_does_not_read_holds_up_nobody_else(serve: Any) -> None:
    async def much(_: Context, request: StringValue) -> StringValue:
        return StringValue(value=LARGE)

    async with serve({"Say": much, "Other": echo}) as served, served.raw() as deaf:
        request = ttrpc_pb2.Request(service=NAME, method="Say").SerializeToString()
        sent = 0
        with anyio.move_on_after(0.5):
            while sent < 20_000:
                await deaf.send(b"".join(encode(sent * 2 + i * 2 + 1, REQUEST, 0, request)
                                         for i in range(100)))  # fmt: skip
                sent += 100
        # The server stops reading from it, and makes no answers that it would not read.
        assert sent < 20_000
        assert served.calls < 5
        with anyio.fail_after(20):
            async with connect(served.path) as client:
                await client.call(NAME, "Other", StringValue(), StringValue)


async def test_a_slow_reader_gets_everything_in_the_end(serve: Any) -> None:
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


async def test_cancelling_serve_leaves_no_connection(
    tmp_path: Path, descriptor: ServiceDescriptor, server_class: Any
) -> None:
    path = str(tmp_path / "s")
    before = set(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server_class([Service(descriptor, {"Say": echo})]).serve, listener)
            async with connect(path) as client:
                await Caller(client).say()
                tasks.cancel_scope.cancel()
    assert set(os.listdir("/proc/self/fd")) == before


async def test_many_connections_leave_nothing_behind(serve: Any, until: Any) -> None:
    async with serve({"Say": echo}) as served:
        await anyio.wait_all_tasks_blocked()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(200):
            async with connect(served.path) as client:
                await Caller(client).say()
        await until(lambda: len(os.listdir("/proc/self/fd")) == before)


@pytest.mark.parametrize("seed", seeds(1))
async def test_hostile_bytes_disturb_nobody_else(serve: Any, seed: int) -> None:
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
            assert await Caller(client).say() == "hi"
        assert {event for event, _ in served.log} <= {"a client broke off"}


async def test_a_lack_of_file_descriptors_passes_and_is_logged_once(
    serve: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[socket.socket] = []
    accept = socket.socket.accept

    def attempt(listener: socket.socket) -> tuple[socket.socket, Any]:
        attempts.append(listener)
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", attempt)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serve({"Say": echo}) as served:
        with socket.socket(socket.AF_UNIX) as late, contextlib.ExitStack() as full:
            late.setblocking(False)
            top = max(map(int, os.listdir("/proc/self/fd"))) + 1
            full.enter_context(restored())
            resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
            with contextlib.suppress(OSError):
                while True:
                    full.callback(os.close, os.dup(0))
            late.connect(served.path)
            await until(lambda: len(attempts) > 2)
            full.close()
            async with anyio.create_task_group() as tasks:
                client = Client(late, tasks)
                with anyio.fail_after(20):
                    assert await Caller(client).say() == "hi"
                client.close()
        assert [event for event, _ in served.log] == ["cannot accept a connection now"]


async def test_a_bug_that_one_connection_meets_is_not_for_all_to_pay(serve: Any) -> None:
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
            await unlucky.call(NAME, "Other", StringValue(), StringValue)
        assert await Caller(client).say() == "hi"
        assert told == ["a handler failed", "a connection failed"]


async def test_a_deadline_is_not_for_what_comes_in_time(calling: Any) -> None:
    async with calling({"Say": echo}) as caller:
        for _ in range(20):
            assert await caller.say(timeout=5) == "hi"
        with raises(DeadlineExceeded):
            await caller.say(timeout=0)
