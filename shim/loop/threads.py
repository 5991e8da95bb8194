"""Threads, for system calls that block and cannot be polled."""

from __future__ import annotations

from _thread import start_new_thread
from typing import TYPE_CHECKING, TypeVar

from shim.loop import core

if TYPE_CHECKING:
    from collections.abc import Callable

    from shim.loop.core import Loop, Task

    Result = TypeVar("Result")


class _Work:
    """A function that a thread calls, and the task that waits for it."""

    __slots__ = ("error", "function", "loop", "result", "waiting")

    def __init__(self, function: Callable[[], object], loop: Loop, waiting: Task) -> None:
        self.function = function
        self.loop = loop
        self.waiting: Task | None = waiting
        self.result: object = None
        self.error: BaseException | None = None

    def work(self) -> None:
        """In the thread."""
        try:
            self.result = self.function()
        except BaseException as error:  # noqa: BLE001 - raised where the thread is waited for
            self.error = error
        try:
            self.loop.call_from_thread(self.finish)
        except RuntimeError:
            self.error = None  # the loop has ended, and with it the task that waited

    def finish(self) -> None:
        """In the loop: the thread has ended."""
        task, self.waiting = self.waiting, None
        if task is None:
            self.error = None  # the wait was cancelled. Its traceback has this object
        else:
            self.loop.schedule(task)

    def forget(self) -> None:
        """In the loop: the wait was cancelled."""
        self.waiting = None


async def run_in_thread(function: Callable[[], Result]) -> Result:
    """Call a function in a thread of its own; if the task is cancelled, the thread goes on.

    Raises:
        RuntimeError: no thread can be started, or no descriptor is left to wake the loop.
    """
    core.raise_if_cancelled()
    loop = core.current()
    try:
        loop.expect_calls()
    except OSError as scarce:
        raise RuntimeError(str(scarce)) from scarce
    work = _Work(function, loop, core.current_task())
    start_new_thread(work.work, ())
    await core.park(work.forget)
    error, work.error = work.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback has this frame
    return work.result  # type: ignore[return-value] # what the function has returned
