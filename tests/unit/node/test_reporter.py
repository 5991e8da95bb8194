"""Writes to the cluster: when they are repeated."""

from __future__ import annotations

from types import SimpleNamespace

import anyio
import pytest

from hooks.config import Config
from integration.agent_errors import ApiServerRefused, EventNotMade
from integration.apiserver.client import ApiServer
from integration.node import reporter
from integration.node.options import Options
from integration.node.reporter import keep_reported
from integration.node.service import Context
from tests.harness.node_state import publish


@pytest.mark.anyio
@pytest.mark.parametrize("is_cause", [False, True], ids=["the error", "its cause"])
async def test_a_busy_server_is_not_asked_again_before_the_time_that_it_names(
    monkeypatch: pytest.MonkeyPatch, *, is_cause: bool
) -> None:
    context = Context(Config(), Options(), lambda *_, **__: None)
    calls, paused, may_go_on = list[int](), list[float](), anyio.Event()

    def write(_: ApiServer) -> None:
        calls.append(1)
        busy = ApiServerRefused("to write", found="429 Too Many Requests")
        busy.http, busy.retry_after = 429, 7.0
        if is_cause:
            raise EventNotMade("to write an event", found=busy.found) from busy
        raise busy

    async def sleep(seconds: float) -> None:
        paused.append(seconds)
        await may_go_on.wait()

    monkeypatch.setattr(reporter, "anyio", SimpleNamespace(sleep=sleep))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_reported, context, write, context.state.reloads)
        with anyio.fail_after(20):
            while not paused:
                await anyio.wait_all_tasks_blocked()
        publish(context.state.reloads, 1)
        await anyio.wait_all_tasks_blocked()
        assert (len(calls), paused) == (1, [7.0])
        may_go_on.set()
        with anyio.fail_after(20):
            while len(calls) < 2:
                await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
