"""The loop: tasks that take turns, and wait for descriptors, points in time and threads.

A task is a coroutine that runs until it *parks*: it yields a function that ends its wait. It stays
parked until :meth:`Loop.schedule` resumes it. Cancelling a parked task calls that function and
raises :class:`Cancelled` where the task waits; while a scope around it is cancelled, every further
wait ends at once in the same way.

These invariants make each wait end exactly once:

- A task is queued (once), running, parked (``park`` is set), or ended.
- Only a parked task can be scheduled; otherwise scheduling has no effect. So a scheduled task that
  is cancelled before its turn keeps its result, and is cancelled at its next wait.
- Whatever wakes a task also forgets it, and so does the function that ends its wait. So nothing
  from an earlier wait can end the next one.
- An ended task leaves no reference cycle, because the shim seldom runs the collector.

Source: eventfd(2); epoll_ctl(2); epoll(7), "Will closing a file descriptor cause
it to be removed from all epoll interest lists?".
"""

from __future__ import annotations

import os
import select
import time
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from heapq import heapify, heappop, heappush
from typing import Any, Final

READ: Final = select.EPOLLIN | select.EPOLLRDHUP
WRITE: Final = select.EPOLLOUT
# An end of file and an error wake readers and writers alike.
ENDS: Final = select.EPOLLHUP | select.EPOLLERR

# Seconds. epoll takes a timeout of at most 2**31 milliseconds.
_LONGEST: Final = 2e6

# The heap is cleaned when its stopped timers exceed half of all timers by this number.
_STALE: Final = 64

now = time.monotonic


class Cancelled(BaseException):
    """Raised in a cancelled task. Do not catch it."""


class Timer:
    """Calls a function at a given time, unless stopped before.

    Args:
        when: the time, on the loop's clock.
        function: the function.
    """

    __slots__ = ("function", "when")

    def __init__(self, when: float, function: Callable[[], object]) -> None:
        self.when = when
        self.function: Callable[[], object] | None = function

    def __lt__(self, other: Timer) -> bool:
        return self.when < other.when


class Timers:
    """A heap of timers. A stopped one stays until it reaches the top, or until many are stopped."""

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
            # In place, because a timer that is being called may stop others.
            self._timers[:] = [timer for timer in self._timers if timer.function is not None]
            heapify(self._timers)
            self._stopped = 0

    def patience(self) -> float | None:
        """Return the seconds that the loop may wait for descriptors; None for no limit."""
        timers = self._timers
        while timers and timers[0].function is None:
            heappop(timers)
            self._stopped -= 1
        return max(0.0, timers[0].when - now()) if timers else None

    def ring(self) -> None:
        """Call the functions that are due."""
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
    """A coroutine in the loop.

    Attributes:
        coro: the coroutine.
        name: what the task does, for messages.
        scope: the innermost scope around it.
        park: ends the task's wait; None unless it is parked.
        ended: called at the task's end with its exception, or None.
        result: the task's return value.
    """

    __slots__ = ("coro", "ended", "name", "park", "result", "scope")

    def __init__(
        self,
        coro: Coroutine[Any, Any, Any],
        name: str,
        scope: Any,  # a CancelScope
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self.coro = coro
        self.name = name
        self.scope = scope
        self.park: Callable[[], object] | None = None
        self.ended = ended
        self.result: Any = None
        scope.add(self)


class _Park:
    """The awaitable with which a task parks."""

    __slots__ = ("_remove",)

    def __init__(self, remove: Callable[[], object]) -> None:
        self._remove = remove

    def __await__(self) -> Generator[Callable[[], object], None, None]:
        yield self._remove


class Descriptors:
    """The waiting tasks, and the functions to call, by descriptor.

    A task waits once: its descriptor is registered with EPOLLONESHOT, which afterwards leaves it in
    epoll without events. A watched descriptor stays armed, level-triggered, until its owner
    unwatches it, which must happen before closing it.

    Other code may close and reuse descriptors that tasks wait for without notice, so never trust
    epoll's registrations:

    - If a number was closed and is now another file, epoll does not have it, and it is registered
      again.
    - If another process or a duplicate keeps a file description open, it stays in epoll after its
      number was closed here. It may fire once more under a number that is now another file, and
      wake a task that waits for that file once without cause.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, Task] = {}
        self._writers: dict[int, Task] = {}
        # The numbers that epoll has seen, perhaps as other files.
        self._seen: set[int] = set()
        self.watched: dict[int, Callable[[int], object]] = {}

    def close(self) -> None:
        """Close the epoll descriptor."""
        self._epoll.close()

    def watch(self, fd: int, function: Callable[[int], object], events: int = READ) -> None:
        """Call a function with the events whenever a descriptor is ready.

        Args:
            fd: the descriptor; a second call replaces its function and events.
            function: called once per turn while the descriptor is ready.
            events: the epoll events. Errors and hangups are always included.

        Raises:
            OSError: the descriptor cannot be polled.
        """
        if fd in self.watched:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self.watched[fd] = function

    def unwatch(self, fd: int) -> None:
        """Stop calling the function. Call this before closing the descriptor."""
        if self.watched.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def poll(self, patience: float | None) -> list[tuple[int, int]]:
        """Wait until some descriptors are ready; return them with their events.

        Args:
            patience: the timeout in seconds; None for no timeout. Very long ones are shortened.
        """
        return self._epoll.poll(None if patience is None else min(patience, _LONGEST))

    def wait(self, fd: int, task: Task, *, writing: bool) -> None:
        """Make :meth:`ready` return a task once when a descriptor is ready.

        Raises:
            OSError: the descriptor is closed, or (EPERM) a regular file, which is always ready.
            RuntimeError: another task waits for the same side.
            ValueError: the descriptor is negative, like a closed socket's.
        """
        if fd < 0:
            message = "wait for a descriptor that is closed"
            raise ValueError(message)
        waiting = self._writers if writing else self._readers
        if fd in waiting:
            message = f"two tasks wait for descriptor {fd}"
            raise RuntimeError(message)
        waiting[fd] = task
        try:
            self._arm(fd)
        except OSError:
            del waiting[fd]
            raise

    def forget(self, fd: int, *, writing: bool) -> None:
        """Remove the task that waits for one side."""
        del (self._writers if writing else self._readers)[fd]
        try:
            if fd in self._readers or fd in self._writers:
                self._arm(fd)
            else:
                self._seen.discard(fd)
                self._epoll.unregister(fd)
        except OSError:
            pass  # closed meanwhile

    def ready(self, fd: int, events: int) -> list[Task]:
        """Remove and return the tasks that an event of :meth:`poll` wakes."""
        woken, left = [], []
        for side, waiting in ((READ, self._readers), (WRITE, self._writers)):
            if fd in waiting:
                if events & (side | ENDS):
                    woken.append(waiting.pop(fd))
                else:
                    left.append(waiting)
        if left:
            try:
                self._arm(fd)
            except OSError:  # closed meanwhile; the waiter will notice
                woken += [waiting.pop(fd) for waiting in left]
        return woken

    def _arm(self, fd: int) -> None:
        wanted = select.EPOLLONESHOT
        if fd in self._readers:
            wanted |= READ
        if fd in self._writers:
            wanted |= WRITE
        if fd in self._seen:
            try:
                self._epoll.modify(fd, wanted)
            except FileNotFoundError:
                pass  # now another file's number
            else:
                return
        try:
            self._epoll.register(fd, wanted)
        except FileExistsError:  # closed without unregistering, and opened again
            self._epoll.modify(fd, wanted)
        self._seen.add(fd)


class Loop:
    """See the module."""

    def __init__(self) -> None:
        self.current: Task | None = None
        self.tasks: set[Task] = set()
        self.descriptors: Descriptors = Descriptors()
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
            That task's return value.

        Raises:
            BaseException: its exception, or a signal handler's.
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
            error: the exception to raise where the task waits.
        """
        if task.park is not None:
            task.park = None
            self._ready.append((task, error))

    def cancel(self, task: Task) -> None:
        """Cancel a task's wait, if any."""
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
            if remove is another_turn:
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
        """Prepare for :meth:`call_from_thread`. Call this in the loop's own thread."""
        if self._waker < 0:
            # A semaphore: one call per turn, so that a thread with many calls delays no other.
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
        with self._waker_guard:  # otherwise the number might mean another file
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
    """The ``park`` of a wait that cannot be cancelled."""


def another_turn() -> None:
    """Give a task its next turn after all other tasks, without parking it."""


def running() -> bool:
    """Whether a loop is running in this process."""
    return _current is not None


def set_current(loop: Loop | None) -> None:
    """Set the running loop, or none."""
    global _current  # noqa: PLW0603 - there is one loop in a process
    _current = loop


def current() -> Loop:
    """Return the running loop.

    Raises:
        RuntimeError: no loop is running.
    """
    if _current is None:
        message = "no loop is running"
        raise RuntimeError(message)
    return _current


def current_task() -> Task:
    """Return the running task.

    Raises:
        RuntimeError: no task is running.
    """
    task = current().current
    if task is None:
        message = "no task is running"
        raise RuntimeError(message)
    return task


def park(remove: Callable[[], object]) -> _Park:
    """Return an awaitable that parks the current task until it is scheduled again.

    Args:
        remove: ends the task's wait if it is cancelled; :func:`unyielding` forbids cancellation.
    """
    return _Park(remove)


def raise_if_cancelled() -> None:
    """A cancellation point that does not yield to other tasks.

    Raises:
        Cancelled: a scope around the task is cancelled.
    """
    if current_task().scope.effectively_cancelled:
        raise Cancelled


def current_time() -> float:
    """Return the loop's clock, in seconds."""
    return now()


def running_tasks() -> list[Task]:
    """Return the tasks that have not ended."""
    return list(current().tasks)
