"""Run blocking calls in daemon threads that never delay the exit of the process.

A thread that waits for a server or a hung file system must not keep the agent from exiting. anyio's
own threads would: Python joins them at exit, even after a call was abandoned.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Final, Generic, TypeVar, cast

import anyio

__all__ = ["SlowCall", "run_detached"]

T = TypeVar("T")

# The most threads that wait for a next call: starting one takes longer than most calls.
_MOST_IDLE: Final = 4


class _Handover(Generic[T]):
    """The outcome of a call on its way to the waiting task: either taken or dropped, never lost.

    Args:
        drop: called with a result that no task takes.
    """

    def __init__(self, drop: Callable[[T], object]) -> None:
        self._drop = drop
        self._lock = threading.Lock()
        self._outcomes: list[tuple[T | None, BaseException | None]] = []
        self._is_abandoned = False

    def put(self, result: T | None, failed: BaseException | None) -> bool:
        """Store the outcome; return whether a task still waits for it."""
        with self._lock:
            self._outcomes.append((result, failed))
            return not self._is_abandoned

    def take(self) -> T:
        """Return the result, or raise the exception."""
        result, failed = self._outcomes.pop()
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # it refers to this frame
        return cast("T", result)

    def abandon(self) -> None:
        """Stop waiting; drop a result that has arrived at the same moment."""
        with self._lock:
            self._is_abandoned = True
        self.discard()

    def discard(self) -> None:
        """Drop the result, unless it was taken or dropped before."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
        for result, failed in outcomes:
            if failed is None:
                self._drop(cast("T", result))


class _Thread:
    """A daemon thread that makes calls, one after the other."""

    def __init__(self) -> None:
        self._is_kept = True
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="run_detached", daemon=True).start()

    def call(self, do: Callable[[], object]) -> None:
        """Call a function that raises nothing, and calls :meth:`rest` once."""
        self._calls.put(do)

    def rest(self) -> None:
        """Let it make another call after this one, unless enough threads wait for one."""
        self._is_kept = len(_idle) < _MOST_IDLE
        if self._is_kept:
            _idle.append(self)

    def end(self) -> None:
        """End it after the calls so far."""
        self._calls.put(None)

    def _run(self) -> None:
        while self._is_kept and (do := self._calls.get()) is not None:
            do()
            del do  # it refers to the result


_idle: deque[_Thread] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # a child has none of the threads


async def run_detached(
    do: Callable[..., T], *arguments: object, drop: Callable[[T], object] = lambda _: None
) -> T:
    """Call a function in a daemon thread.

    Args:
        do: the function. After a cancellation it continues, and its result is dropped.
        arguments: the arguments of ``do``.
        drop: called with the result after a cancellation, for example to close it.

    Returns:
        The result of ``do``. An exception in ``do`` is raised here.
    """
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()
    handover = _Handover(drop)

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    def run() -> None:
        result, failed = None, None
        try:
            result = do(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting task
            failed = error
        if not handover.put(result, failed):
            handover.discard()
            thread.rest()
            return
        thread.rest()  # before the caller continues: its next call is made by the same thread
        try:
            loop.call_soon_threadsafe(wake)
        except RuntimeError:  # the event loop is closed; the process is about to exit
            handover.discard()

    try:
        thread = _idle.pop()
    except IndexError:
        thread = _Thread()
    thread.call(partial(copy_context().run, run))
    try:
        await woken
    except BaseException:
        handover.abandon()
        raise
    return handover.take()


class SlowCall:
    """Makes calls that may hang, one at a time, with a time limit for each.

    A call that takes too long continues in its thread. Until it has ended no other is made, because
    that would probably hang as well, and need another thread.

    Args:
        to_finish: seconds that a call may take after a cancellation. Without them the next caller
            may find it under way.
    """

    def __init__(self, to_finish: float = 0.0) -> None:
        self._to_finish = to_finish
        self._calling = anyio.Lock()
        self._ended: threading.Event | None = None

    async def run(self, do: Callable[[], T], seconds: float) -> T:
        """Call a function in a thread of its own.

        Args:
            do: the function.
            seconds: the time limit.

        Returns:
            The result of ``do``. An exception in ``do`` is raised here.

        Raises:
            TimeoutError: the call took too long, or an earlier one still does.
        """
        async with self._calling:
            if self._ended is not None and not self._ended.is_set():
                raise TimeoutError
            self._ended = ended = threading.Event()

            def run() -> T:
                try:
                    return do()
                finally:
                    ended.set()

            try:
                with anyio.fail_after(seconds):
                    try:
                        return await run_detached(run)
                    except RuntimeError:  # no thread can be started now
                        ended.set()
                        raise
            except anyio.get_cancelled_exc_class():
                if self._to_finish:
                    with anyio.CancelScope(shield=True):
                        await run_detached(ended.wait, self._to_finish)
                raise
