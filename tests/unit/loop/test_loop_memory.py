"""The loop leaves no garbage cycles."""

from __future__ import annotations

import gc
import os
import time
from _thread import allocate_lock
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shim import loop

pytestmark = pytest.mark.usefixtures("no_collector")


async def _fail(*_: Any, **__: Any) -> None:
    await loop.checkpoint()
    raise ValueError("a task")


async def _waits() -> None:
    event, lock = loop.Event(), loop.Lock()
    async with loop.create_task_group() as tasks:
        tasks.start_soon(event.wait)
        tasks.start_soon(lock.acquire)
        await loop.sleep(0.0001)
        event.set()


async def _cancelled_waits() -> None:
    event, lock = loop.Event(), loop.Lock()
    reading, writing = os.pipe()
    await lock.acquire()
    async with loop.create_task_group() as tasks:
        tasks.start_soon(event.wait)
        tasks.start_soon(lock.acquire)
        tasks.start_soon(loop.sleep, 10)
        tasks.start_soon(loop.run_in_thread, list)
        tasks.start_soon(loop.wait_readable, reading)
        tasks.start_soon(loop.wait_writable, writing)
        await loop.checkpoint()
        tasks.cancel_scope.cancel()
    lock.release()
    os.close(reading)
    os.close(writing)


async def _scopes() -> None:
    with loop.move_on_after(0.0001), loop.CancelScope(), loop.fail_after(10):
        await loop.sleep(10)
    try:
        with loop.fail_after(0):
            await loop.sleep(10)
    except TimeoutError:
        pass


async def _errors() -> None:
    try:
        async with loop.create_task_group() as tasks:
            tasks.start_soon(_fail)
            tasks.start_soon(loop.sleep, 10)
            await loop.sleep(10)
    except* ValueError:
        pass


async def _errors_of_a_host() -> None:
    try:
        async with loop.create_task_group() as tasks:
            tasks.start_soon(loop.sleep, 10)
            raise ValueError("the host")  # noqa: TRY301 - as any host may
    except* ValueError:
        pass


async def _cancelled_groups() -> None:
    with loop.move_on_after(0.0001):
        async with loop.create_task_group() as tasks:
            tasks.start_soon(loop.sleep, 10)
            await loop.sleep(10)


async def _threads() -> None:
    def fail() -> None:
        raise ValueError("a thread")

    await loop.run_in_thread(list)
    try:
        await loop.run_in_thread(fail)
    except ValueError:
        pass
    go_on = allocate_lock()
    go_on.acquire()

    def fail_late() -> None:
        go_on.acquire()
        fail()

    with loop.move_on_after(0.0001):
        await loop.run_in_thread(fail_late)
    go_on.release()
    await loop.run_in_thread(lambda: time.sleep(0.05))  # the other task runs, and ends


@pytest.mark.parametrize(
    "life",
    [
        _waits, _cancelled_waits, _scopes, _errors, _errors_of_a_host, _cancelled_groups,
        _threads,
    ],
)  # fmt: skip
def test_no_cycles_are_left(life: Callable[[], Awaitable[None]]) -> None:
    async def main() -> list[str]:
        await life()
        gc.collect()
        for _ in range(5):
            await life()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            return [repr(thing)[:200] for thing in gc.garbage]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()

    assert loop.run(main) == []
