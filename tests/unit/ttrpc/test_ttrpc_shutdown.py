"""The end of a server: at once, in good order, or with its listener."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.wrappers_pb2 import StringValue

from api.errors import Status
from api.ttrpc import (
    ConnectFailed,
    ConnectionClosed,
    Context,
    LocalProtocolError,
    RemoteError,
    Service,
)
from api.ttrpc.client import connect
from tests.unit.ttrpc.calls import LARGE, echo, say

pytestmark = pytest.mark.anyio


async def test_shutdown_ends_idle_connections_at_once(serve: Any, service: str) -> None:
    async with serve({"Say": echo}) as served, connect(served.path) as client:
        await say(client, service)
        began = time.monotonic()
        await served.server.shutdown(60)
        assert time.monotonic() - began < 20
        with anyio.fail_after(20):
            await client.wait_closed()
        with pytest.raises(ConnectionClosed):
            await say(client, service)
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
            answers.append(await say(client, service))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await served.until_calls(1)
            tasks.start_soon(served.server.shutdown, 10)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(RemoteError, match="shutting down") as caught:
                await say(client, service)
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
                await say(client, service)

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
        assert await say(client, service) == "stopping " + LARGE
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
        await say(client, service)
        with socket.socket(socket.AF_UNIX) as listener, pytest.raises(LocalProtocolError):
            await served.server.serve(listener)


async def test_a_listener_that_fails_ends_the_server_with_its_error(
    tmp_path: Path, descriptor: ServiceDescriptor, server_class: Any
) -> None:
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(OSError, match="Invalid"):
        # Never told to listen: accept(2) says EINVAL.
        with anyio.fail_after(20):
            await server_class([Service(descriptor, {})]).serve(listener)
