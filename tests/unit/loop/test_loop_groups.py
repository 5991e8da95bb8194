"""Groups of tasks, and how they end."""

# ruff: noqa: PT012 - what a group or a scope raises, it raises when it is left

from __future__ import annotations

from typing import Any

import pytest

from shim import loop

pytestmark = pytest.mark.anyio


async def _fail(delay: float = 0) -> None:
    await loop.sleep(delay)
    raise ValueError("a task")


async def _sleep(order: list[str], name: str) -> None:
    try:
        await loop.sleep(10)
    finally:
        order.append(name)


async def test_the_first_error_cancels_the_others_and_the_host() -> None:
    order: list[str] = []
    with pytest.raises(ExceptionGroup) as caught:
        async with loop.create_task_group() as tasks:
            tasks.start_soon(_sleep, order, "other")
            tasks.start_soon(_fail, 0.001)
            await _sleep(order, "host")
    assert sorted(order) == ["host", "other"]
    assert [str(error) for error in caught.value.exceptions] == ["a task"]
    assert caught.value.__suppress_context__


async def test_errors_of_host_and_tasks_are_raised_together() -> None:
    async def fail_late() -> None:
        try:
            await loop.sleep(10)
        finally:
            raise KeyError("late")

    with pytest.raises(ExceptionGroup) as caught:
        async with loop.create_task_group() as tasks:
            tasks.start_soon(fail_late)
            await loop.sleep(0.001)
            raise ValueError("host")
    assert [type(error) for error in caught.value.exceptions] == [ValueError, KeyError]


async def test_an_error_outweighs_a_cancellation_from_outside() -> None:
    async def fail_late() -> None:
        try:
            await loop.sleep(10)
        finally:
            raise KeyError("late")

    with pytest.raises(ExceptionGroup), loop.CancelScope() as outer:
        async with loop.create_task_group() as tasks:
            tasks.start_soon(fail_late)
            await loop.sleep(0.001)
            outer.cancel()
    assert not outer.cancelled_caught


async def test_who_leaves_a_group_waits_for_tasks_that_are_started_meanwhile() -> None:
    order: list[int] = []

    async def start_next(tasks: Any, left: int) -> None:
        await loop.sleep(0.001)
        order.append(left)
        if left:
            tasks.start_soon(start_next, tasks, left - 1)

    async with loop.create_task_group() as tasks:
        tasks.start_soon(start_next, tasks, 3)
    assert order == [3, 2, 1, 0]


async def test_a_group_that_is_not_entered_starts_nothing() -> None:
    tasks = loop.create_task_group()
    with pytest.raises(RuntimeError):
        tasks.start_soon(_fail)
    async with tasks:
        pass
    with pytest.raises(RuntimeError):
        tasks.start_soon(_fail)


async def test_a_task_of_a_cancelled_group_runs_until_it_waits() -> None:
    order: list[str] = []

    async def task() -> None:
        order.append("began")
        await loop.sleep(10)
        order.append("never")

    async with loop.create_task_group() as tasks:
        tasks.cancel_scope.cancel()
        tasks.start_soon(task)
    assert order == ["began"]
    assert tasks.cancel_scope.cancel_called


async def test_a_cancellation_from_outside_is_not_the_groups_own() -> None:
    with loop.CancelScope() as outer:
        async with loop.create_task_group() as tasks:
            tasks.start_soon(loop.sleep, 10)
            tasks.start_soon(loop.sleep, 10)
            await loop.sleep(0.001)
            outer.cancel()
    assert outer.cancelled_caught
    assert not tasks.cancel_scope.cancelled_caught


async def test_a_cancelled_that_leaks_out_of_a_task_cancels_its_group() -> None:
    async def leak() -> None:
        raise loop.Cancelled

    async with loop.create_task_group() as tasks:
        tasks.start_soon(leak)
        await loop.sleep(10)
    assert tasks.cancel_scope.cancel_called


async def test_a_group_in_a_shield_ends_in_its_own_time() -> None:
    order: list[str] = []

    async def work() -> None:
        await loop.sleep(0.01)
        order.append("worked")

    with loop.CancelScope() as outer:
        outer.cancel()
        with loop.CancelScope(shield=True):
            async with loop.create_task_group() as tasks:
                tasks.start_soon(work)
        order.append("after")
        await loop.sleep(10)
    assert order == ["worked", "after"]
