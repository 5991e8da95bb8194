"""The loop: tasks that take turns, and wait for descriptors, times and threads.

A task is a coroutine that runs until it *parks*: it yields a function that removes it from the
thing it waits for. It stays parked until :meth:`Loop.schedule` resumes it. Cancelling a parked
task calls that function and raises :class:`Cancelled` where the task waits; as long as a scope
around it is cancelled, every further wait ends in the same way at once.

Invariants, by which each wait ends exactly once:

- A task is queued (once), running, parked (``park`` is set), or ended.
- Only a parked task can be scheduled; otherwise scheduling has no effect. So a task that was
  scheduled and is cancelled before its turn keeps its result, and is cancelled at its next wait.
- Whatever wakes a task forgets it, and so does the function that removes it: nothing can end its
  next wait in place of the one that ended.
- An ended task leaves no reference cycle: the shim runs the collector seldom.

Source: eventfd(2).
"""

from __future__ import annotations

import math
import os
import time
from _thread import allocate_lock
from collections import deque
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Final, Protocol

from shim.loop.descriptors import READ, Descriptors

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine, Generator


# The heap is cleaned when it has this many stopped timers, and more than half as many as all.
_STALE: Final = 64


now = time.monotonic


class Cancelled(BaseException):
    """Raised in a task that is cancelled. Let it through."""


class Scope(Protocol):
    """What a task needs of its innermost :class:`~shim.loop.scopes.CancelScope`."""

    @property
    def effectively_cancelled(self) -> bool:
        """Whether waits inside are cancelled."""

    def add(self, task: Task) -> None:
        """A task enters."""

    def remove(self, task: Task) -> None:
        """A task leaves."""


class Timer:
    """A function that is called at a time, unless the timer is stopped before.

    Args:
        when: on the loop's clock.
        function: it.
    """

    __slots__ = ("function", "when")

    def __init__(self, when: float, function: Callable[[], object]) -> None:
        self.when = when
        self.function: Callable[[], object] | None = function

    def __lt__(self, other: Timer) -> bool:
        return self.when < other.when


class Timers:
    """A heap of timers. A stopped one stays in it until it is on top, or many are stopped."""

    def __init__(self) -> None:
        self._timers: list[Timer] = []
        self._stopped = 0

    def at(self, when: float, function: Callable[[], object]) -> Timer:
        """Call a function at a time."""
        timer = Timer(when, function)
        heappush(self._timers, timer)
        return timer

    def stop(self, timer: Timer) -> None:
        """Do not call the function."""
        if timer.function is None:
            return
        timer.function = None
        self._stopped += 1
        if self._stopped > _STALE + len(self._timers) // 2:
            # In place: a timer that is being called may stop others.
            self._timers[:] = [timer for timer in self._timers if timer.function is not None]
            heapify(self._timers)
            self._stopped = 0

    def patience(self) -> float | None:
        """How long the loop may wait for descriptors, in seconds; None for no limit."""
        timers = self._timers
        while timers and timers[0].function is None:
            heappop(timers)
            self._stopped -= 1
        return max(0.0, timers[0].when - now()) if timers else None

    def ring(self) -> None:
        """Call the functions whose time has come."""
        timers = self._timers
        if not timers:
            return
        clock = now()
        while timers and (timers[0].function is None or timers[0].when <= clock):
            timer = heappop(timers)
            function, timer.function = timer.function, None
            if function is None:
                self._stopped -= 1
            else:
                function()


class Task:
    """A coroutine that takes turns with others.

    Attributes:
        coro: the coroutine.
        name: what it does, for people.
        scope: the innermost scope that it is in.
        park: removes it from the thing it waits for; None unless it is parked.
        ended: called with what it raised, or None, when it has ended.
        result: what it returned.
    """

    __slots__ = ("coro", "ended", "name", "park", "result", "scope")

    def __init__(
        self,
        coro: Coroutine[Any, Any, Any],
        name: str,
        scope: Any,
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self.coro = coro
        self.name = name
        self.scope: Any = scope  # a Scope; CancelScope has more for those who enter it
        self.park: Callable[[], object] | None = None
        self.ended = ended
        self.result: Any = None
        scope.add(self)


class _Park:
    """What a task awaits to park."""

    __slots__ = ("_remove",)

    def __init__(self, remove: Callable[[], object]) -> None:
        self._remove = remove

    def __await__(self) -> Generator[Callable[[], object], None, None]:
        yield self._remove


class Loop:
    """See the module."""

    def __init__(self) -> None:
        self.current: Task | None = None
        self.tasks: set[Task] = set()
        self.descriptors: Descriptors[Task] = Descriptors()
        self.timers = Timers()
        self._ready: deque[tuple[Task, BaseException | None]] = deque()
        self._calls: deque[Callable[[], object]] = deque()
        self._waker = -1
        self._waker_guard = allocate_lock()

    def close(self) -> None:
        """Close the loop's descriptors."""
        self.descriptors.close()
        with self._waker_guard:
            waker, self._waker = self._waker, -1
        if waker >= 0:
            os.close(waker)

    def run(self, main: Task) -> Any:
        """Run tasks until one of them has ended.

        Returns:
            What it returned.

        Raises:
            BaseException: what it raised, or what a signal handler raised.
        """
        ended: list[BaseException | None] = []
        main.ended = ended.append
        while not ended:
            self._turn()
        raised = ended.pop()
        if raised is not None:
            try:
                raise raised
            finally:
                del raised  # its traceback has this frame
        return main.result

    def start(self, task: Task) -> None:
        """Give a new task its first turn."""
        self.tasks.add(task)
        self._ready.append((task, None))

    def schedule(self, task: Task, error: BaseException | None = None) -> None:
        """Resume a task, if it is parked.

        Args:
            task: the task.
            error: raised where it waits.
        """
        if task.park is not None:
            task.park = None
            self._ready.append((task, error))

    def cancel(self, task: Task) -> None:
        """Cancel a task's wait, if it waits."""
        remove = task.park
        if remove is not None and remove is not unyielding:
            remove()
            self.schedule(task, Cancelled())

    def _turn(self) -> None:
        ready, descriptors = self._ready, self.descriptors
        for fd, events in descriptors.poll(0 if ready else self.timers.patience()):
            watcher = descriptors.watched.get(fd)
            if watcher is not None:
                watcher(events)
            else:
                for task in descriptors.ready(fd, events):
                    self.schedule(task)
        self.timers.ring()
        for _ in range(len(ready)):
            self._step(*ready.popleft())

    def _step(self, task: Task, error: BaseException | None) -> None:
        self.current = task
        try:
            remove = task.coro.send(None) if error is None else task.coro.throw(error)
        except StopIteration as end:
            task.result = end.value
            self._end(task, None)
        except BaseException as raised:  # noqa: BLE001 - its group decides
            self._end(task, raised)
        else:
            if remove is _another_turn:
                self._ready.append((task, None))
            else:
                task.park = remove
                if task.scope.effectively_cancelled:
                    self.cancel(task)
        finally:
            self.current = None
            del error  # its traceback has this frame

    def _end(self, task: Task, raised: BaseException | None) -> None:
        self.tasks.discard(task)
        task.scope.remove(task)
        task.ended(raised)

    # -- threads ---------------------------------------------------------------------------

    def expect_calls(self) -> None:
        """Prepare for :meth:`call_from_thread`. Called in the loop's own thread."""
        if self._waker < 0:
            # A semaphore: one call a turn, so that a thread with many calls delays no other.
            waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
            try:
                self.descriptors.watch(waker, self._call, READ)
            except OSError:
                os.close(waker)
                raise
            self._waker = waker

    def call_from_thread(self, function: Callable[[], object]) -> None:
        """Call a function in the loop's thread.

        Raises:
            RuntimeError: the loop has ended.
        """
        with self._waker_guard:  # or the number might be another file's
            if self._waker < 0:
                message = "the loop has ended"
                raise RuntimeError(message)
            self._calls.append(function)
            os.eventfd_write(self._waker, 1)

    def _call(self, _: int) -> None:
        os.eventfd_read(self._waker)
        self._calls.popleft()()


_current: Loop | None = None


def unyielding() -> None:
    """Parks a task where it cannot be cancelled."""


def _another_turn() -> None:
    """Does not park a task: its next turn comes after the other tasks'."""


def running() -> bool:
    """Whether a loop is running in this process."""
    return _current is not None


def set_current(loop: Loop | None) -> None:
    """Make a loop the one that runs, or none."""
    global _current  # noqa: PLW0603 - there is one loop in a process
    _current = loop


def current() -> Loop:
    """The loop that runs.

    Raises:
        RuntimeError: none runs.
    """
    if _current is None:
        message = "no loop is running"
        raise RuntimeError(message)
    return _current


def current_task() -> Task:
    """The task that runs.

    Raises:
        RuntimeError: none runs.
    """
    task = current().current
    if task is None:
        message = "no task is running"
        raise RuntimeError(message)
    return task


def park(remove: Callable[[], object]) -> _Park:
    """What the current task awaits until it is scheduled again.

    Args:
        remove: removes it from the thing it waits for, if it is cancelled. :func:`unyielding`
            keeps it from being cancelled.
    """
    return _Park(remove)


def raise_if_cancelled() -> None:
    """A cancellation point that does not yield to other tasks.

    Raises:
        Cancelled: a scope that the task is in is cancelled.
    """
    if current_task().scope.effectively_cancelled:
        raise Cancelled


def current_time() -> float:
    """The loop's clock, in seconds."""
    return now()


async def checkpoint() -> None:
    """Yield to the other tasks once. A cancellation point."""
    raise_if_cancelled()
    await _Park(_another_turn)
    raise_if_cancelled()


async def sleep(delay: float) -> None:
    """Wait for some seconds.

    Raises:
        ValueError: the delay is negative or not a number.
    """
    if delay == 0:
        await checkpoint()
        return
    if delay == math.inf:
        await _Park(_nothing)
        return
    if not delay > 0:
        message = "sleep for a negative time"
        raise ValueError(message)
    loop, task = current(), current_task()
    timer = loop.timers.at(now() + delay, lambda: loop.schedule(task))
    await _Park(lambda: loop.timers.stop(timer))


def _nothing() -> None:
    """A task that sleeps for ever is not registered anywhere."""


async def wait_readable(what: socket.socket | int) -> None:
    """Wait until a descriptor is readable, at its end, or in error."""
    await _wait(what, writing=False)


async def wait_writable(what: socket.socket | int) -> None:
    """Wait until a descriptor is writable, or in error."""
    await _wait(what, writing=True)


def _wait(what: socket.socket | int, *, writing: bool) -> _Park:
    raise_if_cancelled()
    fd = what if isinstance(what, int) else what.fileno()
    descriptors = current().descriptors
    descriptors.wait(fd, current_task(), writing=writing)
    return _Park(lambda: descriptors.forget(fd, writing=writing))


def watch(fd: int, function: Callable[[int], object], events: int = READ) -> None:
    """Call a function whenever a descriptor is ready; see :meth:`Descriptors.watch`.

    The function runs outside of any task: it must not wait, and what it raises ends the loop.
    """
    current().descriptors.watch(fd, function, events)


def unwatch(fd: int) -> None:
    """Stop that. Call this before closing the descriptor."""
    current().descriptors.unwatch(fd)


def running_tasks() -> list[Task]:
    """The tasks that have not ended."""
    return list(current().tasks)
