"""Our own loop: its turns, times, threads and end."""

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

from api import aio
from api.aio import loop as loops
from api.aio import timers
from api.aio.descriptors import Descriptors
from tests.harness.launcher import REPOSITORY


def test_a_task_that_is_not_parked_cannot_be_scheduled() -> None:
    turns: list[str] = []

    async def main() -> None:
        loop = loops.current()
        me = loops.current_task()
        loop.schedule(me)  # runs
        await aio.checkpoint()
        turns.append("main")

        async def other() -> None:
            turns.append("other")
            await aio.sleep(0.001)
            turns.append("slept")

        task = loops.Task(other(), "other", me.scope, lambda _: turns.append("over"))
        loop.start(task)
        loop.schedule(task)  # is about to run
        loop.schedule(task, ValueError())
        loop.cancel(task)
        await aio.sleep(0.01)
        loop.schedule(task)  # is over
        await aio.checkpoint()
        assert not loop._ready

    aio.run(main)
    assert turns == ["main", "other", "slept", "over"]


def test_a_task_is_in_the_queue_at_most_once(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = loops.Loop._turn

    def checked(loop: loops.Loop) -> None:
        queued = [task for task, _ in loop._ready]
        assert len(queued) == len(set(queued))
        assert all(task.park is None for task in queued)
        parked = loop.tasks - set(queued)
        assert all(task.park is not None for task in parked)
        turn(loop)

    monkeypatch.setattr(loops.Loop, "_turn", checked)

    async def work(event: Any, lock: Any, number: int) -> None:
        with aio.move_on_after(number / 2000):
            async with lock:
                await aio.checkpoint()
                await event.wait()

    async def main() -> None:
        event, lock = aio.Event(), aio.Lock()
        async with aio.create_task_group() as tasks:
            for number in range(30):
                tasks.start_soon(work, event, lock, number)
            await aio.sleep(0.008)
            event.set()
            tasks.cancel_scope.cancel()

    aio.run(main)


def test_what_the_main_task_returns_and_raises_comes_out() -> None:
    async def main(what: Any) -> Any:
        await aio.checkpoint()
        if isinstance(what, BaseException):
            raise what
        return what

    assert aio.run(main, 7) == 7
    for error in (ValueError(), SystemExit(3), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            aio.run(main, error)
    assert not loops.running()


def test_there_is_one_loop() -> None:
    async def nothing() -> None:
        pass

    async def main() -> None:
        with pytest.raises(RuntimeError):
            aio.run(nothing)

    aio.run(main)
    with pytest.raises(RuntimeError):
        loops.current()


def test_a_keyboard_interrupt_while_all_wait_cancels_everything_and_is_raised() -> None:
    order: list[str] = []

    async def task() -> None:
        try:
            await aio.sleep(10)
        finally:
            with aio.CancelScope(shield=True):
                await aio.sleep(0.001)
            order.append("task")

    async def main() -> None:
        try:
            async with aio.create_task_group() as tasks:
                tasks.start_soon(task)
        finally:
            order.append("main")

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            aio.run(main)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert order == ["task", "main"]


def test_a_base_exception_of_a_task_is_its_groups() -> None:
    async def task() -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        async with aio.create_task_group() as tasks:
            tasks.start_soon(task)
            await aio.sleep(10)

    with pytest.raises(BaseExceptionGroup) as caught:
        aio.run(main)
    assert isinstance(caught.value.exceptions[0], KeyboardInterrupt)


# -- times -------------------------------------------------------------------------------------


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """For how long the loop has waited for descriptors, each time."""
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
            with aio.move_on_after(0.05):
                await aio.checkpoint()
        timer = threading.Timer(0.1, os.write, (writing, b"x"))
        timer.start()
        waits.clear()
        await aio.wait_readable(reading)
        timer.join()
        os.close(reading)
        os.close(writing)

    aio.run(main)
    assert waits[-1] is None
    assert len(waits) <= 2


def test_stopped_timers_do_not_pile_up() -> None:
    async def main() -> None:
        for _ in range(5000):
            with aio.move_on_after(3600):
                pass
        assert len(loops.current().timers._timers) < 200

    aio.run(main)


def test_timers_that_stop_others_when_they_ring_leave_all_in_order() -> None:
    rung: list[int] = []
    heap = timers.Timers()
    start = timers.now()
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
    assert last in heap._timers
    assert heap._stopped == sum(timer.function is None for timer in heap._timers)
    patience = heap.patience()
    assert patience is not None
    assert 1700 < patience <= 1800
    heap.stop(last)
    heap.stop(last)
    assert heap.patience() is None
    assert heap._stopped == 0


def test_a_time_that_is_further_than_epoll_can_wait_is_waited_for_in_parts(
    waits: list[float | None],
) -> None:
    async def main() -> None:
        with aio.move_on_after(300 * 365 * 86400), aio.move_on_after(0.01):
            await aio.sleep(1e300)
        async with aio.create_task_group() as tasks:
            tasks.start_soon(aio.sleep, 300 * 365 * 86400)
            reading, writing = os.pipe()
            timer = threading.Timer(0.02, os.write, (writing, b"x"))
            timer.start()
            await aio.wait_readable(reading)
            timer.join()
            os.close(reading)
            os.close(writing)
            tasks.cancel_scope.cancel()

    aio.run(main)
    assert any(wait is not None and wait > 1e9 for wait in waits)


# -- threads -----------------------------------------------------------------------------------


def test_threads_call_in_the_loop_in_order_and_from_several() -> None:
    called: list[tuple[int, int]] = []

    def work(thread: int) -> None:
        for number in range(100):
            aio.call_in_loop(lambda number=number: called.append((thread, number)))  # type: ignore[misc]

    async def main() -> None:
        async with aio.create_task_group() as tasks:
            for thread in range(5):
                tasks.start_soon(aio.run_in_thread, lambda thread=thread: work(thread))

    aio.run(main)
    assert len(called) == 500
    for thread in range(5):
        assert [n for t, n in called if t == thread] == list(range(100))


def test_what_a_thread_returns_and_raises_comes_out() -> None:
    def fail() -> None:
        raise KeyError("of the thread")

    async def main() -> None:
        assert await aio.run_in_thread(threading.get_ident) != threading.get_ident()
        with pytest.raises(KeyError, match="of the thread"):
            await aio.run_in_thread(fail)

    aio.run(main)


def test_a_thread_that_outlives_its_loop_writes_to_no_descriptor_of_others() -> None:
    go_on, done = allocate_lock(), allocate_lock()
    go_on.acquire()
    done.acquire()
    refused: list[BaseException] = []

    def work() -> None:
        go_on.acquire()
        try:
            aio.call_in_loop(list)
        except RuntimeError as error:
            refused.append(error)
        done.release()

    async def main() -> int:
        with aio.move_on_after(0.01) as scope:
            await aio.run_in_thread(work)
        assert scope.cancelled_caught
        return loops.current()._waker

    reading, writing = os.pipe()
    number = aio.run(main)
    os.dup2(writing, number)
    go_on.release()
    assert done.acquire(timeout=5)
    time.sleep(0.02)  # for what the thread does when its function has returned
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):
        os.read(reading, 8)
    for fd in (reading, writing, number):
        os.close(fd)
    assert len(refused) == 1


def test_what_a_call_raises_is_for_who_waits_for_the_thread_and_for_nobody_else() -> None:
    called: list[int] = []

    def work() -> None:
        aio.call_in_loop(lambda: 1 // 0)
        aio.call_in_loop(lambda: called.append(1))
        aio.call_in_loop([].pop)

    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await aio.run_in_thread(work)
        assert called == [1]

    aio.run(main)


def test_what_a_call_raises_for_whom_nobody_waits_any_more_harms_nobody() -> None:
    go_on = allocate_lock()
    go_on.acquire()
    called: list[int] = []

    def work() -> None:
        go_on.acquire()
        aio.call_in_loop(lambda: 1 // 0)
        aio.call_in_loop(lambda: called.append(1))

    async def main() -> None:
        with aio.move_on_after(0.01):
            await aio.run_in_thread(work)
        go_on.release()
        with aio.fail_after(5):
            while not called:
                await aio.sleep(0.001)

    aio.run(main)


# -- signals -----------------------------------------------------------------------------------


def test_signals_arrive_in_a_burst_and_between_turns() -> None:
    received: list[int] = []

    async def main() -> None:
        with aio.open_signal_receiver(signal.SIGUSR1, signal.SIGUSR2) as signals:
            for _ in range(50):
                os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGUSR2)
            async for number in signals:
                received.append(number)
                if number == signal.SIGUSR2:
                    break
            with aio.move_on_after(0.02) as scope:
                await anext(signals)
            assert scope.cancelled_caught
            # While nobody has a turn; the wait goes on after a signal that nobody receives.
            child = subprocess.Popen(  # noqa: ASYNC220 - it begins, and is not waited for
                ["/bin/sh", "-c", f"kill -WINCH {os.getpid()}; kill -USR1 {os.getpid()}"]
            )
            with aio.fail_after(5):
                assert await anext(signals) == signal.SIGUSR1
            child.wait()

    aio.run(main)
    assert received == [signal.SIGUSR1] * 50 + [signal.SIGUSR2]


def test_a_receiver_restores_what_was_before_and_also_when_it_fails() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    fds = os.listdir("/proc/self/fd")

    async def main() -> None:
        with aio.open_signal_receiver(signal.SIGUSR1, signal.SIGUSR1):
            pass
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        with pytest.raises(OSError, match=r"."), aio.open_signal_receiver(10, signal.SIGKILL):
            pass
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN

    try:
        aio.run(main)
        assert signal.set_wakeup_fd(-1) == -1
        assert os.listdir("/proc/self/fd") == fds
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_async_generator_that_is_left_is_closed_at_once_and_must_not_wait() -> None:
    # As the documentation of api.aio says: the loop finishes none.
    script = """
import sys
sys.unraisablehook = lambda what: print(type(what.exc_value).__name__, what.exc_value)
from api import aio

async def numbers(wait):
    try:
        yield 1
    finally:
        print("closed")
        if wait:
            await aio.sleep(0)

async def main():
    for wait in (False, True):
        async for _ in numbers(wait):
            break
        print("left")

aio.run(main)
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
