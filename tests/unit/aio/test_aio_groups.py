"""Groups of tasks, and how they end: on our own loop as on asyncio."""

# ruff: noqa: PT012 - what a group or a scope raises, it raises when it is left

from __future__ import annotations

from typing import Any

import pytest

from api import aio

pytestmark = pytest.mark.anyio


async def _fail(delay: float = 0) -> None:
    await aio.sleep(delay)
    raise ValueError("a task")


async def _sleep(order: list[str], name: str) -> None:
    try:
        await aio.sleep(10)
    finally:
        order.append(name)


async def test_the_first_error_cancels_the_others_and_the_host() -> None:
    order: list[str] = []
    with pytest.raises(ExceptionGroup) as caught:
        async with aio.create_task_group() as tasks:
            tasks.start_soon(_sleep, order, "other")
            tasks.start_soon(_fail, 0.001)
            await _sleep(order, "host")
    assert sorted(order) == ["host", "other"]
    assert [str(error) for error in caught.value.exceptions] == ["a task"]
    assert caught.value.__suppress_context__


async def test_errors_of_host_and_tasks_are_raised_together() -> None:
    async def fail_late() -> None:
        try:
            await aio.sleep(10)
        finally:
            raise KeyError("late")

    with pytest.raises(ExceptionGroup) as caught:
        async with aio.create_task_group() as tasks:
            tasks.start_soon(fail_late)
            await aio.sleep(0.001)
            raise ValueError("host")
    assert [type(error) for error in caught.value.exceptions] == [ValueError, KeyError]


async def test_an_error_outweighs_a_cancellation_from_outside() -> None:
    async def fail_late() -> None:
        try:
            await aio.sleep(10)
        finally:
            raise KeyError("late")

    with pytest.raises(ExceptionGroup), aio.CancelScope() as outer:
        async with aio.create_task_group() as tasks:
            tasks.start_soon(fail_late)
            await aio.sleep(0.001)
            outer.cancel()
    assert not outer.cancelled_caught


async def test_who_leaves_a_group_waits_for_tasks_that_are_started_meanwhile() -> None:
    order: list[int] = []

    async def start_next(tasks: Any, left: int) -> None:
        await aio.sleep(0.001)
        order.append(left)
        if left:
            tasks.start_soon(start_next, tasks, left - 1)

    async with aio.create_task_group() as tasks:
        tasks.start_soon(start_next, tasks, 3)
    assert order == [3, 2, 1, 0]


async def test_a_group_that_is_not_entered_starts_nothing() -> None:
    tasks = aio.create_task_group()
    with pytest.raises(RuntimeError):
        tasks.start_soon(_fail)
    async with tasks:
        pass
    with pytest.raises(RuntimeError):
        tasks.start_soon(_fail)
    with pytest.raises(RuntimeError):
        await tasks.start(_fail)


async def test_a_task_of_a_cancelled_group_runs_until_it_waits() -> None:
    order: list[str] = []

    async def task() -> None:
        order.append("began")
        await aio.sleep(10)
        order.append("never")

    async with aio.create_task_group() as tasks:
        tasks.cancel_scope.cancel()
        tasks.start_soon(task)
    assert order == ["began"]
    assert tasks.cancel_scope.cancel_called


async def test_a_cancellation_from_outside_is_not_the_groups_own() -> None:
    with aio.CancelScope() as outer:
        async with aio.create_task_group() as tasks:
            tasks.start_soon(aio.sleep, 10)
            tasks.start_soon(aio.sleep, 10)
            await aio.sleep(0.001)
            outer.cancel()
    assert outer.cancelled_caught
    assert not tasks.cancel_scope.cancelled_caught


async def test_a_cancelled_that_leaks_out_of_a_task_cancels_its_group() -> None:
    async def leak() -> None:
        raise aio.get_cancelled_exc_class()

    async with aio.create_task_group() as tasks:
        tasks.start_soon(leak)
        await aio.sleep(10)
    assert tasks.cancel_scope.cancel_called


async def test_a_group_in_a_shield_ends_in_its_own_time() -> None:
    order: list[str] = []

    async def work() -> None:
        await aio.sleep(0.01)
        order.append("worked")

    with aio.CancelScope() as outer:
        outer.cancel()
        with aio.CancelScope(shield=True):
            async with aio.create_task_group() as tasks:
                tasks.start_soon(work)
        order.append("after")
        await aio.sleep(10)
    assert order == ["worked", "after"]


# -- start -------------------------------------------------------------------------------------


async def test_start_returns_what_the_task_says_and_the_task_goes_on() -> None:
    order: list[str] = []

    async def task(first: str, *, task_status: Any) -> None:
        await aio.sleep(0.001)
        task_status.started(first + "!")
        await aio.sleep(0.001)
        order.append("went on")

    async with aio.create_task_group() as tasks:
        assert await tasks.start(task, "begun") == "begun!"
        assert order == []
    assert order == ["went on"]


async def test_an_error_before_it_has_begun_is_raised_by_start_and_not_by_the_group() -> None:
    async def task(*, task_status: Any) -> None:
        await aio.sleep(0.001)
        raise ValueError("before")

    async with aio.create_task_group() as tasks:
        with pytest.raises(ValueError, match="before"):
            await tasks.start(task)
        assert not tasks.cancel_scope.cancel_called
        await aio.checkpoint()


async def test_an_error_after_it_has_begun_is_the_groups() -> None:
    async def task(*, task_status: Any) -> None:
        task_status.started()
        raise ValueError("after")

    with pytest.raises(ExceptionGroup) as caught:
        async with aio.create_task_group() as tasks:
            await tasks.start(task)
            await aio.sleep(10)
    assert str(caught.value.exceptions[0]) == "after"


async def test_a_task_that_is_over_before_it_has_begun_is_an_error() -> None:
    async def task(*, task_status: Any) -> None:
        await aio.checkpoint()

    async with aio.create_task_group() as tasks:
        with pytest.raises(RuntimeError):
            await tasks.start(task)


async def test_a_task_begins_once() -> None:
    async def task(*, task_status: Any) -> None:
        task_status.started()
        task_status.started()

    with pytest.raises(ExceptionGroup) as caught:
        async with aio.create_task_group() as tasks:
            await tasks.start(task)
            await aio.sleep(10)
    assert isinstance(caught.value.exceptions[0], RuntimeError)


@pytest.mark.parametrize("says", [False, True], ids=["silent", "says that it has begun"])
async def test_a_start_that_is_cancelled_cancels_the_task_and_waits_for_its_end(
    *, says: bool
) -> None:
    order: list[str] = []

    async def task(*, task_status: Any) -> None:
        try:
            await aio.sleep(10)
        finally:
            if says:
                task_status.started()
            with aio.CancelScope(shield=True):
                await aio.sleep(0.01)
            order.append("the task")

    async with aio.create_task_group() as tasks:
        with aio.move_on_after(0.01) as scope:
            try:
                await tasks.start(task)
            finally:
                order.append("start")
        assert scope.cancelled_caught
        assert order == ["the task", "start"]
        assert not tasks.cancel_scope.cancel_called


async def test_a_start_whose_task_begins_in_the_turn_that_cancels_it_returns() -> None:
    values: list[int] = []

    async def task(scope: Any, *, task_status: Any) -> None:
        await aio.sleep(0.001)
        task_status.started(7)
        scope.cancel()
        await aio.sleep(0.001)
        values.append(0)

    async with aio.create_task_group() as tasks:
        with aio.CancelScope() as scope:
            values.append(await tasks.start(task, scope))
            await aio.sleep(10)
        assert scope.cancelled_caught
    assert values == [7, 0]
