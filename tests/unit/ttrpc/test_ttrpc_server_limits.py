"""Clients that go, are slow, hostile or too many, and handlers that take their time."""

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
from tests.unit.ttrpc.calls import LARGE, OutOfCheese, echo, say

pytestmark = pytest.mark.anyio


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
            assert await say(staying, service, "staying") == "staying"

        tasks.start_soon(stay)
        async with connect(served.path) as going, anyio.create_task_group() as calls:
            calls.start_soon(say, going, service, "going")
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
            await say(client, service)
        assert caught.value.status == Status.INTERNAL
        assert [event for event, _ in server.log] == ["a handler failed"]


async def test_a_connection_that_breaks_in_a_frame_is_logged_and_forgotten(
    serve: Any, service: str, until: Any
) -> None:
    async with serve({"Say": echo}) as served:
        async with served.raw() as raw:
            await raw.send(b"\0\0\0\x05\0\0")
        async with connect(served.path) as client:
            assert await say(client, service) == "hi"
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
            await say(client, service)
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
                outcomes.append(await say(client, service))
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
                await say(client, service, LARGE)
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
        assert await say(client, service, "and on it goes") == ""


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
                await say(client, service)
                tasks.cancel_scope.cancel()
    assert set(os.listdir("/proc/self/fd")) == before


async def test_many_connections_leave_nothing_behind(serve: Any, service: str, until: Any) -> None:
    async with serve({"Say": echo}) as served:
        await anyio.wait_all_tasks_blocked()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(200):
            async with connect(served.path) as client:
                await say(client, service)
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
            assert await say(client, service) == "hi"
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
                    assert await say(client, service) == "hi"
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
        assert await say(client, service) == "hi"
        assert told == ["a handler failed", "a connection failed"]


async def test_a_deadline_is_not_for_what_comes_in_time(serve: Any, service: str) -> None:
    async with serve({"Say": echo}) as served, connect(served.path) as client:
        for _ in range(20):
            assert await say(client, service, timeout=5) == "hi"
        with pytest.raises(DeadlineExceeded):
            await say(client, service, timeout=0)
