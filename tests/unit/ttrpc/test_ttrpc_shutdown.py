"""Stopping a server: immediately, gracefully, or with its listener."""

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
from tests.harness.raising import raises
from tests.unit.ttrpc.calls import LARGE, Gate, echo

pytestmark = pytest.mark.anyio


async def test_shutdown_ends_idle_connections_at_once(calling: Any) -> None:
    async with calling({"Say": echo}) as caller:
        await caller.say()
        began = time.monotonic()
        await caller.served.server.shutdown(60)
        assert time.monotonic() - began < 20
        with anyio.fail_after(20):
            await caller.client.wait_closed()
        with pytest.raises(ConnectionClosed):
            await caller.say()
        with raises(ConnectFailed):
            async with connect(caller.served.path):
                pass
        with anyio.fail_after(20):
            await caller.served.returned.wait()


async def test_shutdown_lets_requests_finish_and_begins_no_new_ones(calling: Any) -> None:
    gate = Gate()
    async with calling({"Say": gate}) as caller:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(caller.ask)
            await caller.served.until_calls(1)
            tasks.start_soon(caller.served.server.shutdown, 10)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(RemoteError, match="shutting down") as caught:
                await caller.say()
            assert caught.value.status == Status.UNAVAILABLE
            gate.open.set()
        assert caller.outcomes == ["HI"]
        assert caller.served.returned.is_set()


async def test_shutdown_waits_no_longer_than_its_grace(calling: Any) -> None:
    async with (
        calling({"Say": Gate()}) as caller,
        anyio.create_task_group() as tasks,
    ):

        async def ask() -> None:
            with pytest.raises(ConnectionClosed):
                await caller.say()

        tasks.start_soon(ask)
        await caller.served.until_calls(1)
        began = time.monotonic()
        await caller.served.server.shutdown(0.1)
        assert 0.1 <= time.monotonic() - began < 20


async def test_a_second_shutdown_can_be_less_patient(serve: Any) -> None:
    async with serve({"Say": Gate()}) as served, served.raw() as raw:
        await raw.request(1, "Say")
        await served.until_calls(1)
        served.server.close(60)
        with anyio.fail_after(20):
            await served.server.shutdown(0)


async def test_a_handler_that_closes_the_server_is_answered(calling: Any) -> None:
    async def stop(_: Context, request: StringValue) -> StringValue:
        caller.served.server.close()
        return StringValue(value="stopping " + LARGE)

    async with calling({"Say": stop}) as caller:
        assert await caller.say() == "stopping " + LARGE
        with anyio.fail_after(20):
            await caller.client.wait_closed()
            await caller.served.returned.wait()


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


async def test_a_server_serves_one_listener_at_a_time(calling: Any) -> None:
    async with calling({"Say": echo}) as caller:
        await caller.say()
        with socket.socket(socket.AF_UNIX) as listener, raises(LocalProtocolError):
            await caller.served.server.serve(listener)


async def test_a_listener_that_fails_ends_the_server_with_its_error(
    descriptor: ServiceDescriptor, server_class: Any
) -> None:
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(OSError, match="Invalid"):
        # Never told to listen: accept(2) says EINVAL.
        with anyio.fail_after(20):
            await server_class([Service(descriptor, {})]).serve(listener)
