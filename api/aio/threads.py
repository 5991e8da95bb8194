"""Threads, for what can be waited for in no other way."""

from __future__ import annotations

from _thread import _local, start_new_thread

from api.aio import loop as loops

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from api.aio.loop import Loop, Task

    Result = TypeVar("Result")


class _Here(_local):
    """Of a thread: what it was started for."""

    work: _Work | None = None


_here = _Here()


class _Work:
    """A function that a thread calls, and who waits for it."""

    __slots__ = ("error", "function", "loop", "raised", "result", "waiting")

    def __init__(self, function: Callable[[], object], loop: Loop, waiting: Task) -> None:
        self.function = function
        self.loop = loop
        self.waiting: Task | None = waiting
        self.result: object = None
        self.error: BaseException | None = None
        # By what it has had called in the loop.
        self.raised: Exception | None = None

    def work(self) -> None:
        """In the thread."""
        _here.work = self
        try:
            self.result = self.function()
        except BaseException as error:  # noqa: BLE001 - it arises where the thread is waited for
            self.error = error
        try:
            self.loop.call_from_thread(self.finish)
        except RuntimeError:
            self.error = None  # the loop is over, and with it whoever waited

    def call_in_loop(self, function: Callable[[], object]) -> None:
        """In the thread: have a function called in the loop.

        Raises:
            RuntimeError: the loop is over.
        """
        self.loop.call_from_thread(lambda: self._call(function))

    def _call(self, function: Callable[[], object]) -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 - it arises where the thread is waited for
            if self.waiting is not None and self.raised is None:
                self.raised = error

    def finish(self) -> None:
        """In the loop, when the thread has nothing more to do."""
        task, self.waiting = self.waiting, None
        raised, self.raised = self.raised, None
        if task is None:
            self.error = None  # nobody waits any more. Its traceback has this object
        else:
            self.error = self.error or raised
            self.loop.schedule(task)

    def forget(self) -> None:
        """In the loop: nobody waits any more."""
        self.waiting = self.raised = None


async def run_in_thread(function: Callable[[], Result]) -> Result:
    """Call a function in a thread of its own; if the task is cancelled, the thread goes on.

    Raises:
        RuntimeError: no thread is to be had, or no descriptor by which it says that it is done.
    """
    loops.raise_if_cancelled()
    loop = loops.current()
    try:
        loop.expect_calls()
    except OSError as scarce:
        raise RuntimeError(str(scarce)) from scarce
    work = _Work(function, loop, loops.current_task())
    start_new_thread(work.work, ())
    await loops.park(work.forget)
    error, work.error = work.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback has this frame
    return work.result  # type: ignore[return-value] # what the function has returned


def work_of_thread() -> _Work | None:
    """What the current thread was started for, if it was by a loop."""
    return _here.work
