"""Which tasks are cancelled, when, and which scope catches it."""

# ruff: noqa: PT012 - what a group or a scope raises, it raises when it is left

from __future__ import annotations

import math
from typing import Any

import pytest

from shim import loop

pytestmark = pytest.mark.anyio


async def test_every_further_wait_in_a_cancelled_scope_ends_at_once() -> None:
    ended = 0
    with loop.CancelScope() as scope:
        scope.cancel()
        for _ in range(3):
            try:
                await loop.sleep(10)
            except loop.Cancelled:
                ended += 1
        await loop.sleep(10)
    assert ended == 3
    assert scope.cancelled_caught


async def test_a_scope_that_is_cancelled_before_it_is_entered_cancels_the_first_wait() -> None:
    scope = loop.CancelScope()
    scope.cancel()
    with scope:
        before = True
        await loop.sleep(10)
    assert before
    assert scope.cancelled_caught


async def test_a_scope_without_a_wait_has_caught_nothing() -> None:
    with loop.CancelScope() as scope:
        scope.cancel()
    assert scope.cancel_called
    assert not scope.cancelled_caught


async def test_of_two_cancelled_scopes_the_outer_one_catches() -> None:
    after = False
    with loop.CancelScope() as outer:
        with loop.CancelScope() as inner:
            inner.cancel()
            outer.cancel()
            await loop.sleep(10)
        after = True
    assert (outer.cancelled_caught, inner.cancelled_caught, after) == (True, False, False)


async def test_a_shield_that_is_cancelled_itself_catches_in_a_cancelled_scope() -> None:
    # Code after a shielded cleanup that timed out still runs.
    after = False
    with loop.CancelScope() as outer:
        outer.cancel()
        deadline = loop.current_time() + 0.01
        with loop.CancelScope(deadline=deadline, shield=True) as inner:
            await loop.sleep(10)
        after = True
        await loop.sleep(10)
    assert (outer.cancelled_caught, inner.cancelled_caught, after) == (True, True, True)


async def test_a_deadline_can_be_moved_either_way_while_somebody_waits() -> None:
    async def move(scope: Any, seconds: float) -> None:
        scope.deadline = loop.current_time() + seconds

    async with loop.create_task_group() as tasks:
        with loop.move_on_after(10) as scope:
            tasks.start_soon(move, scope, 0.01)
            await loop.sleep(5)
        assert scope.cancelled_caught
        with loop.move_on_after(0.2) as scope:
            tasks.start_soon(move, scope, math.inf)
            await loop.sleep(0.3)
        assert not scope.cancel_called
        with loop.move_on_after(10) as scope:
            tasks.start_soon(move, scope, -1)
            await loop.sleep(5)
        assert scope.cancelled_caught


async def test_a_deadline_that_is_over_cancels_at_the_first_wait() -> None:
    with loop.move_on_after(0) as scope:
        await loop.sleep(10)
    assert scope.cancelled_caught


async def test_fail_after_raises_only_for_its_own_deadline() -> None:
    with pytest.raises(TimeoutError), loop.fail_after(0.01):
        await loop.sleep(10)
    with loop.fail_after(10) as scope:
        scope.cancel()
        await loop.sleep(10)
    with loop.move_on_after(0.01) as outer, loop.fail_after(10):
        await loop.sleep(10)
    assert outer.cancelled_caught


async def test_a_scope_is_not_entered_again_from_inside() -> None:
    with loop.CancelScope() as scope, pytest.raises(RuntimeError), scope:
        pass


async def test_an_error_on_the_way_out_of_a_cancelled_scope_is_not_caught() -> None:
    with pytest.raises(ValueError, match="on the way"), loop.CancelScope() as scope:
        scope.cancel()
        try:
            await loop.sleep(10)
        finally:
            raise ValueError("on the way")
    assert not scope.cancelled_caught


async def test_an_event_and_a_cancellation_in_the_same_turn() -> None:
    order: list[str] = []

    async def wait(event: Any, scope: Any) -> None:
        with scope:
            await event.wait()
            order.append("woken")
            await loop.sleep(10)
        order.append(f"caught {scope.cancelled_caught}")

    async with loop.create_task_group() as tasks:
        for first in ("set", "cancel"):
            event, scope = loop.Event(), loop.CancelScope()
            tasks.start_soon(wait, event, scope)
            await loop.sleep(0.01)
            if first == "set":
                event.set()
                scope.cancel()
            else:
                scope.cancel()
                event.set()
            await loop.sleep(0.01)
    assert order == ["woken", "caught True", "caught True"]


async def test_a_lock_that_is_handed_to_who_is_cancelled_in_the_same_turn_is_not_lost() -> None:
    lock = loop.Lock()
    order: list[str] = []

    async def take(name: str, scope: Any) -> None:
        with scope:
            async with lock:
                order.append(name)
                await loop.sleep(0.01)

    for first in ("release", "cancel"):
        scope = loop.CancelScope()
        async with loop.create_task_group() as tasks:
            await lock.acquire()
            tasks.start_soon(take, "cancelled", scope)
            await loop.sleep(0.005)
            tasks.start_soon(take, "next", loop.CancelScope())
            await loop.sleep(0.005)
            if first == "release":
                lock.release()
                scope.cancel()
            else:
                scope.cancel()
                lock.release()
        async with lock:
            order.append("free")
    assert order == ["cancelled", "next", "free", "next", "free"]


async def test_a_lock_is_given_in_order_and_to_none_who_holds_it() -> None:
    lock = loop.Lock()
    order: list[int] = []

    async def take(number: int) -> None:
        async with lock:
            order.append(number)
            await loop.sleep(0.001)

    async with loop.create_task_group() as tasks, lock:
        with pytest.raises(RuntimeError):
            await lock.acquire()
        for number in range(5):
            tasks.start_soon(take, number)
        await loop.sleep(0.005)
    assert order == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError):
        lock.release()


async def test_what_need_not_wait_is_a_point_of_cancellation() -> None:
    event, lock = loop.Event(), loop.Lock()
    event.set()
    for wait in (event.wait, lock.acquire, loop.checkpoint, lambda: loop.sleep(0)):
        with loop.CancelScope() as scope:
            scope.cancel()
            await wait()
        assert scope.cancelled_caught, wait
    async with lock:
        pass  # the lock is free


async def test_no_thread_is_begun_by_who_is_cancelled() -> None:
    begun: list[int] = []
    with loop.CancelScope() as scope:
        scope.cancel()
        await loop.run_in_thread(lambda: begun.append(1))
    assert scope.cancelled_caught
    await loop.sleep(0.02)
    assert begun == []


@pytest.mark.parametrize("delay", [-1, math.nan, -math.inf])
async def test_a_time_that_is_none_is_refused(delay: float) -> None:
    with pytest.raises(ValueError, match=r"."):
        await loop.sleep(delay)


async def test_a_checkpoint_is_cancelled_by_who_has_the_turn_in_between() -> None:
    async with loop.create_task_group() as tasks:
        with loop.CancelScope() as scope:
            tasks.start_soon(_cancel, scope)
            await loop.checkpoint()
            raise AssertionError
    assert scope.cancelled_caught


async def _cancel(scope: Any) -> None:
    scope.cancel()
