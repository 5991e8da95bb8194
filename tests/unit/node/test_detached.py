"""Calls in daemon threads: their results, cancellations and late ends."""

from __future__ import annotations

import asyncio
import threading

import pytest

from integration.detached import SlowCall, run_detached
from tests.harness.waiting import eventually


def test_what_comes_after_the_end_of_the_loop_is_dropped() -> None:
    goes_on, dropped = threading.Event(), list[str]()

    def late() -> str:
        goes_on.wait(60)
        return "a connection"

    async def leave() -> None:
        call = asyncio.ensure_future(run_detached(late, drop=dropped.append))
        await asyncio.sleep(0)
        call.cancel()

    asyncio.run(leave())
    goes_on.set()
    eventually(lambda: dropped == ["a connection"], "it is dropped")


@pytest.mark.parametrize("steps", [0, 1], ids=["not told yet", "told, and not returned"])
def test_what_comes_at_the_moment_of_the_cancellation_is_dropped(steps: int) -> None:
    dropped = list[str]()
    threads = list[threading.Thread]()

    def call() -> str:
        threads.append(threading.current_thread())
        return "a connection"

    async def leave() -> None:
        before = {*threading.enumerate()}
        waiting = asyncio.ensure_future(run_detached(call, drop=dropped.append))
        await asyncio.sleep(0)
        for thread in {*threading.enumerate(), *threads} - before:
            thread.join()  # while the loop is blocked
        for _ in range(steps):
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(leave())
    assert dropped == ["a connection"]


def test_an_error_is_raised_where_it_is_waited_for() -> None:
    def fail() -> None:
        raise KeyError("why")

    with pytest.raises(KeyError, match="why"):
        asyncio.run(run_detached(fail))


def test_a_call_that_hangs_is_waited_for_once_and_no_other_is_made_meanwhile() -> None:
    goes_on, calls = threading.Event(), list[int]()

    def hang() -> None:
        calls.append(1)
        goes_on.wait(60)

    def work() -> str:
        calls.append(2)
        return "done"

    async def run() -> None:
        slow = SlowCall()
        with pytest.raises(TimeoutError):
            await slow.run(hang, 0.01)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await slow.run(work, 60)
        assert calls == [1]
        goes_on.set()
        assert slow._ended is not None
        await asyncio.to_thread(slow._ended.wait, 60)
        # Callers at the same time take turns.
        assert await asyncio.gather(*(slow.run(work, 60) for _ in range(2))) == ["done", "done"]

    asyncio.run(run())
    assert calls == [1, 2, 2]
