"""A failing task does not end others."""

from __future__ import annotations

import math

import pytest

from shim import loop

pytestmark = pytest.mark.anyio


async def test_a_failure_is_reported_and_the_others_go_on() -> None:
    reported: list[Exception] = []
    failed, ended = loop.Event(), loop.Event()

    def report(error: Exception) -> None:
        reported.append(error)
        failed.set()

    async def fail(what: str) -> None:
        raise RuntimeError(what)

    async def go_on() -> None:
        await failed.wait()
        await loop.checkpoint()
        ended.set()

    async with loop.create_task_group() as group:
        tasks = loop.GuardedTasks(group, report)
        tasks.start_soon(go_on)
        tasks.start_soon(fail, "can't start new thread")
        await failed.wait()
        assert not ended.is_set()
    assert ended.is_set()
    assert [str(error) for error in reported] == ["can't start new thread"]


async def test_a_cancelled_group_ends_its_tasks() -> None:
    reported: list[Exception] = []
    async with loop.create_task_group() as group:
        loop.GuardedTasks(group, reported.append).start_soon(loop.sleep, math.inf)
        await loop.checkpoint()
        group.cancel_scope.cancel()
    assert not reported
