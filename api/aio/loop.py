"""The loop: tasks that take turns, and wait for descriptors, times and threads.

A task is a coroutine that runs until it *parks*: it yields a function that takes it out of
whatever it waits for. It is parked until :meth:`Loop.schedule` has it go on. Cancelling a parked
task calls the function and lets :class:`Cancelled` arise where it waits; as long as a scope around
it is cancelled, every further wait ends so at once.

These hold, and make that each wait ends once:

- A task is in one of four states: about to run, in the queue exactly once; running; parked,
  which is when ``park`` is set; over.
- Only a parked task can be scheduled; in any other state it makes no difference. So what was
  scheduled and is cancelled before its turn goes on with what it has got, and learns of the
  cancellation when it waits next.
- Who wakes a task forgets it, and so does the function that takes it out: nobody is left who could
  end its next wait in place of the one that is over.
- When a task ends, nothing of it is left in a cycle: a shim runs the collector seldom.

Source: eventfd(2).
"""

from __future__ import annotations

import math
import os
from _thread import allocate_lock, get_ident
from collections import deque

from api.aio import timers
from api.aio.descriptors import Descriptors
from api.aio.scopes import CancelScope

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine, Generator
    from typing import Any, Protocol, TypeVar

    Result = TypeVar("Result")

    class TaskInfo(Protocol):
        """What can be seen of a task."""

        @property
        def name(self) -> str | None:
            """What it does."""

        @property
        def coro(self) -> Any:
            """Its coroutine."""


class Cancelled(BaseException):
    """Arises in a task that is cancelled. To be let through."""


class Task:
    """A coroutine that takes turns with others.

    Attributes:
        coro: the coroutine.
        name: what it does.
        scope: the innermost scope that it is in.
        park: takes it out of what it waits for; None unless it is parked.
        ended: called when it is over, with what it raised.
        result: what it returned.
    """

    __slots__ = ("coro", "ended", "name", "park", "result", "scope")

    def __init__(
        self,
        coro: Coroutine[Any, Any, Any],
        name: str,
        scope: CancelScope,
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self.coro = coro
        self.name = name
        self.scope = scope
        self.park: Callable[[], object] | None = None
        self.ended = ended
        self.result: Any = None
        scope.take(self)


class _Park:
    """What a task awaits to park."""

    __slots__ = ("_take_out",)

    def __init__(self, take_out: Callable[[], object]) -> None:
        self._take_out = take_out

    def __await__(self) -> Generator[Callable[[], object], None, None]:
        yield self._take_out


class Loop:
    """See the module."""

    def __init__(self) -> None:
        self.current: Task | None = None
        self.tasks: set[Task] = set()
        self.thread = get_ident()
        self.descriptors = Descriptors()
        self.timers = timers.Timers()
        self._ready: deque[tuple[Task, BaseException | None]] = deque()
        self._calls: deque[Callable[[], object]] = deque()
        self._waker = -1
        self._waker_guard = allocate_lock()

    def close(self) -> None:
        """Release what the loop has of the kernel."""
        self.descriptors.close()
        with self._waker_guard:
            waker, self._waker = self._waker, -1
        if waker >= 0:
            os.close(waker)

    def run(self, main: Task) -> Any:
        """Run tasks until one of them is over.

        Returns:
            What it returned.

        Raises:
            BaseException: what it raised; or what a handler of a signal has.
        """
        over: list[BaseException | None] = []
        main.ended = over.append
        while not over:
            self._turn()
        raised = over.pop()
        if raised is not None:
            try:
                raise raised
            finally:
                del raised  # its traceback has this frame
        return main.result

    def start(self, task: Task) -> None:
        """Let a new task have its first turn."""
        self.tasks.add(task)
        self._ready.append((task, None))

    def schedule(self, task: Task, error: BaseException | None = None) -> None:
        """Let a task go on, if it is parked.

        Args:
            task: the task.
            error: what is to arise where it waits.
        """
        if task.park is not None:
            task.park = None
            self._ready.append((task, error))

    def cancel(self, task: Task) -> None:
        """Cancel the wait of a task, if it waits."""
        take_out = task.park
        if take_out is not None and take_out is not unyielding:
            take_out()
            self.schedule(task, Cancelled())

    def _turn(self) -> None:
        ready = self._ready
        for fd, events in self.descriptors.poll(0 if ready else self.timers.patience()):
            if fd == self._waker:
                self._call()
            else:
                for task in self.descriptors.ready(fd, events):
                    self.schedule(task)
        self.timers.ring()
        for _ in range(len(ready)):
            self._step(*ready.popleft())

    def _step(self, task: Task, error: BaseException | None) -> None:
        self.current = task
        try:
            take_out = task.coro.send(None) if error is None else task.coro.throw(error)
        except StopIteration as end:
            task.result = end.value
            self._over(task, None)
        except BaseException as raised:  # noqa: BLE001 - whose group it is has to say
            self._over(task, raised)
        else:
            if take_out is _another_turn:
                self._ready.append((task, None))
            else:
                task.park = take_out
                if task.scope.effectively_cancelled:
                    self.cancel(task)
        finally:
            self.current = None
            del error  # its traceback has this frame

    def _over(self, task: Task, raised: BaseException | None) -> None:
        self.tasks.discard(task)
        task.scope.give(task)
        task.ended(raised)

    # -- threads ---------------------------------------------------------------------------

    def expect_calls(self) -> None:
        """Get ready for :meth:`call_from_thread`, in the loop's own thread."""
        if self._waker < 0:
            # A semaphore: one call a turn, so that a thread that has many keeps nobody from his.
            waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
            try:
                self.descriptors.watch(waker)
            except OSError:
                os.close(waker)
                raise
            self._waker = waker

    def call_from_thread(self, function: Callable[[], object]) -> None:
        """Call a function in the loop's thread.

        Raises:
            RuntimeError: the loop is over.
        """
        with self._waker_guard:  # or the number might be another file's
            if self._waker < 0:
                message = "the loop is over"
                raise RuntimeError(message)
            self._calls.append(function)
            os.eventfd_write(self._waker, 1)

    def _call(self) -> None:
        os.eventfd_read(self._waker)
        self._calls.popleft()()


_current: Loop | None = None


def unyielding() -> None:
    """Parks a task where it cannot be cancelled."""


def _another_turn() -> None:
    """Does not park a task: it has its next turn after the others."""


def running() -> bool:
    """Whether this thread runs a loop of ours."""
    return _current is not None and _current.thread == get_ident()


def current() -> Loop:
    """The loop of this thread.

    Raises:
        RuntimeError: there is none.
    """
    if _current is None:
        message = "no loop is running"
        raise RuntimeError(message)
    return _current


def current_task() -> Task:
    """The task whose turn it is.

    Raises:
        RuntimeError: there is none.
    """
    task = current().current
    if task is None:
        message = "it is nobody's turn"
        raise RuntimeError(message)
    return task


def park(take_out: Callable[[], object]) -> _Park:
    """What the current task awaits until it is scheduled again.

    Args:
        take_out: takes it out of what it waits for, if it is cancelled. :func:`unyielding` keeps
            it from being cancelled.
    """
    return _Park(take_out)


def raise_if_cancelled() -> None:
    """A point of cancellation that keeps the turn.

    Raises:
        Cancelled: a scope that the task is in is cancelled.
    """
    if current_task().scope.effectively_cancelled:
        raise Cancelled


async def checkpoint() -> None:
    """Let the others have their turn."""
    raise_if_cancelled()
    await _Park(_another_turn)
    raise_if_cancelled()


async def sleep(delay: float) -> None:
    """Wait for some seconds.

    Raises:
        ValueError: they are less than none, or no number.
    """
    if delay == 0:
        await checkpoint()
        return
    if delay == math.inf:
        await _Park(_nothing)
        return
    if not delay > 0:
        message = "to sleep for less than no time"
        raise ValueError(message)
    loop, task = current(), current_task()
    timer = loop.timers.at(timers.now() + delay, lambda: loop.schedule(task))
    await _Park(lambda: loop.timers.stop(timer))


def _nothing() -> None:
    """There is nothing that a task would have to be taken out of."""


async def wait_readable(what: socket.socket | int) -> None:
    """Wait until there is something to read."""
    await _wait(what, writing=False)


async def wait_writable(what: socket.socket | int) -> None:
    """Wait until something can be written."""
    await _wait(what, writing=True)


def _wait(what: socket.socket | int, *, writing: bool) -> _Park:
    raise_if_cancelled()
    fd = what if isinstance(what, int) else what.fileno()
    descriptors = current().descriptors
    descriptors.wait(fd, current_task(), writing=writing)
    return _Park(lambda: descriptors.forget(fd, writing=writing))


def running_tasks() -> list[Task]:
    """The tasks that are not over."""
    return list(current().tasks)


def run(function: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any) -> Result:
    """Run a coroutine function in a loop of its own, until it is over.

    Args:
        function: the function; called here.
        arguments: what it is called with.

    Returns:
        What it returns.

    Raises:
        RuntimeError: a loop is running already.
        BaseException: what it raises. What a signal's handler raises while nobody has the turn
            (KeyboardInterrupt) is raised after everything was cancelled, and has ended.
    """
    global _current  # noqa: PLW0603 - there is one loop in a process
    if _current is not None:
        message = "a loop is running already"
        raise RuntimeError(message)
    loop = Loop()
    _current = loop
    try:
        everything = CancelScope()
        main = Task(function(*arguments), "main", everything, _ignore)
        loop.start(main)
        try:
            result: Result = loop.run(main)
        except BaseException:
            if main in loop.tasks:
                everything.cancel()
                try:
                    loop.run(main)
                except Cancelled:
                    pass
            raise
        return result
    finally:
        _current = None
        loop.close()


def _ignore(_: BaseException | None) -> None:
    """Until a loop runs it."""
