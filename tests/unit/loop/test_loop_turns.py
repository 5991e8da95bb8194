"""Our own loop: its turns, timers, threads and shutdown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from _thread import allocate_lock
from typing import Any

import pytest

from shim import loop
from shim.loop import core
from shim.loop.core import Descriptors
from tests.harness.launcher import REPOSITORY
from tests.harness.own_process import restored


def test_what_the_main_task_returns_and_raises_comes_out() -> None:
    async def main(what: Any) -> Any:
        await loop.checkpoint()
        if isinstance(what, BaseException):
            raise what
        return what

    assert loop.run(main, 7) == 7
    for error in (ValueError(), SystemExit(3), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            loop.run(main, error)
    assert not core.running()


def test_there_is_one_loop() -> None:
    async def nothing() -> None:
        pass

    async def main() -> None:
        with pytest.raises(RuntimeError):
            loop.run(nothing)

    loop.run(main)
    with pytest.raises(RuntimeError):
        core.current()


def test_a_keyboard_interrupt_while_all_wait_cancels_everything_and_is_raised() -> None:
    order: list[str] = []

    async def task() -> None:
        interrupt.start()
        try:
            await loop.sleep(10)
        finally:
            with loop.CancelScope(shield=True):
                await loop.sleep(0.001)
            order.append("task")

    async def main() -> None:
        try:
            async with loop.create_task_group() as tasks:
                tasks.start_soon(task)
        finally:
            order.append("main")

    interrupt = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
    with restored():
        signal.signal(signal.SIGUSR1, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            loop.run(main)
    interrupt.join()
    assert order == ["task", "main"]


def test_a_base_exception_of_a_task_is_its_groups() -> None:
    async def task() -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        async with loop.create_task_group() as tasks:
            tasks.start_soon(task)
            await loop.sleep(10)

    with pytest.raises(BaseExceptionGroup) as caught:
        loop.run(main)
    assert isinstance(caught.value.exceptions[0], KeyboardInterrupt)


# -- timers ------------------------------------------------------------------------------------


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Return the timeouts with which the loop has polled."""
    waits: list[float | None] = []
    poll = Descriptors.poll

    def noted(descriptors: Descriptors, patience: float | None) -> Any:
        waits.append(patience)
        return poll(descriptors, patience)

    monkeypatch.setattr(Descriptors, "poll", noted)
    return waits


def test_a_timer_that_was_stopped_wakes_nobody(waits: list[float | None]) -> None:
    async def main() -> None:
        reading, writing = os.pipe()
        for _ in range(200):
            with loop.move_on_after(0.05):
                await loop.checkpoint()
        timer = threading.Timer(0.1, os.write, (writing, b"x"))
        timer.start()
        waits.clear()
        await loop.wait_readable(reading)
        timer.join()
        os.close(reading)
        os.close(writing)

    loop.run(main)
    assert waits[-1] is None
    assert len(waits) <= 2


def test_stopped_timers_do_not_pile_up() -> None:
    async def main() -> None:
        for _ in range(5000):
            with loop.move_on_after(3600):
                pass
        assert len(core.current().timers._timers) < 200

    loop.run(main)


def test_timers_that_stop_others_when_they_ring_leave_all_in_order() -> None:
    rung: list[int] = []
    heap = core.Timers()
    start = core.now()
    others = [heap.at(start + 3600 + number, lambda: rung.append(-1)) for number in range(300)]

    def stop_all() -> None:
        rung.append(0)
        for other in others:
            heap.stop(other)

    heap.at(start - 2, stop_all)
    heap.at(start - 1, lambda: rung.append(1))
    last = heap.at(start + 1800, lambda: rung.append(2))
    heap.ring()
    assert rung == [0, 1]
    patience = heap.patience()
    assert patience is not None
    assert 1700 < patience <= 1800
    heap.stop(last)
    heap.stop(last)
    assert heap.patience() is None


def test_a_time_that_is_further_than_epoll_can_wait_is_waited_for_in_parts(
    waits: list[float | None],
) -> None:
    async def main() -> None:
        with loop.move_on_after(300 * 365 * 86400), loop.move_on_after(0.01):
            await loop.sleep(1e300)
        async with loop.create_task_group() as tasks:
            tasks.start_soon(loop.sleep, 300 * 365 * 86400)
            reading, writing = os.pipe()
            timer = threading.Timer(0.02, os.write, (writing, b"x"))
            timer.start()
            await loop.wait_readable(reading)
            timer.join()
            os.close(reading)
            os.close(writing)
            tasks.cancel_scope.cancel()

    loop.run(main)
    assert any(wait is not None and wait > 1e9 for wait in waits)


# -- threads -----------------------------------------------------------------------------------


def test_threads_that_end_at_once_wake_each_its_own_task() -> None:
    returned: list[tuple[int, int]] = []

    async def work(number: int) -> None:
        returned.append((number, await loop.run_in_thread(lambda: 10 * number)))

    async def main() -> None:
        async with loop.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(work, number)

    loop.run(main)
    assert sorted(returned) == [(number, 10 * number) for number in range(50)]


def test_what_a_thread_returns_and_raises_comes_out() -> None:
    def fail() -> None:
        raise KeyError("of the thread")

    async def main() -> None:
        assert await loop.run_in_thread(threading.get_ident) != threading.get_ident()
        with pytest.raises(KeyError, match="of the thread"):
            await loop.run_in_thread(fail)

    loop.run(main)


def test_a_thread_that_outlives_its_loop_writes_to_no_descriptor_of_others() -> None:
    go_on, done = allocate_lock(), allocate_lock()
    go_on.acquire()
    done.acquire()

    def work() -> None:
        go_on.acquire()
        done.release()

    async def main() -> int:
        with loop.move_on_after(0.01) as scope:
            await loop.run_in_thread(work)
        assert scope.cancelled_caught
        return core.current()._waker

    reading, writing = os.pipe()
    number = loop.run(main)
    os.dup2(writing, number)
    go_on.release()
    assert done.acquire(timeout=5)
    time.sleep(0.02)  # until the thread has finished after its function returned
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):
        os.read(reading, 8)
    for fd in (reading, writing, number):
        os.close(fd)


def test_an_async_generator_that_is_left_is_closed_at_once_and_must_not_wait() -> None:
    # As documented in shim.loop, the loop does not finish asynchronous generators.
    script = """
import sys
sys.unraisablehook = lambda what: print(type(what.exc_value).__name__, what.exc_value)
from shim import loop

async def numbers(wait):
    try:
        yield 1
    finally:
        print("closed")
        if wait:
            await loop.sleep(0)

async def main():
    for wait in (False, True):
        async for _ in numbers(wait):
            break
        print("left")

loop.run(main)
"""
    argv = [sys.executable, "-c", script]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "closed",
        "left",
        "closed",
        "RuntimeError async generator ignored GeneratorExit",
        "left",
    ]
