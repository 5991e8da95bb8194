"""Calls in daemon threads: their results, cancellations and late ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import deque
from typing import Final

import pytest

from integration import detached as module
from integration.detached import SlowCall, run_detached
from integration.timeouts import PATIENCE
from tests.harness.launcher import REPOSITORY
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
def test_what_comes_at_the_moment_of_the_cancellation_is_dropped(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_IDLE", 0)  # its thread ends with the call
    monkeypatch.setattr(module, "_idle", deque())
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
        eventually(lambda: calls, "the first has begun")
        assert calls == [1]
        goes_on.set()
        assert slow._ended is not None
        await asyncio.to_thread(slow._ended.wait, 60)
        # Callers at the same time take turns.
        assert await asyncio.gather(*(slow.run(work, 60) for _ in range(2))) == ["done", "done"]

    asyncio.run(run())
    assert calls == [1, 2, 2]


def test_a_thread_makes_the_next_call_and_no_more_than_a_few_wait_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    idle: deque[module._Thread] = deque()
    monkeypatch.setattr(module, "_idle", idle)
    goes_on = threading.Event()

    def wait() -> threading.Thread:
        goes_on.wait(60)
        return threading.current_thread()

    async def run() -> None:
        first = await run_detached(threading.current_thread)
        for _ in range(2000):
            assert await run_detached(threading.current_thread) is first
        calls = [asyncio.ensure_future(run_detached(wait)) for _ in range(9)]
        await asyncio.sleep(0)
        goes_on.set()
        threads = {*await asyncio.gather(*calls)}
        assert len(threads) == 9
        eventually(
            lambda: sum(thread.is_alive() for thread in threads) == module._MOST_IDLE,
            "the others have ended",
        )
        for each in idle:
            each.end()

    asyncio.run(run())


_FORKED: Final = """
import asyncio, os
from integration import detached
async def call():
    return await detached.run_detached(int, "7")
assert asyncio.run(call()) == 7
while not detached._idle:
    pass
if not (child := os.fork()):
    os._exit(asyncio.run(call()))
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7
"""


def test_a_forked_process_does_not_wait_for_threads_that_it_lacks() -> None:
    subprocess.run(
        [sys.executable, "-c", _FORKED], cwd=REPOSITORY, timeout=60 * PATIENCE, check=True
    )


def test_a_call_for_which_no_thread_can_be_started_keeps_no_later_one_from_being_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def call() -> int:
        calls = SlowCall()
        with monkeypatch.context() as patch:
            patch.setattr(module, "_idle", deque())
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="can't start"):
                await calls.run(int, 20 * PATIENCE)
        return await calls.run(int, 20 * PATIENCE)

    assert asyncio.run(call()) == 0
