"""The loop: tasks that take turns, waits for descriptors, times, and threads.

A task is a coroutine that runs until it *parks*: it yields a function that takes it out of
whatever it waits for, and somebody schedules it again. Cancelling a parked task calls that
function and lets :class:`Cancelled` arise where it waits; as long as a scope around it is
cancelled, every further wait ends so at once.

Descriptors are waited for with EPOLLONESHOT: one system call per wait, and one that is closed
and opened again as another file is noticed when it is waited for next.

Source: epoll(7), eventfd(2).
"""

from __future__ import annotations

import math
import os
import select
import time
from _heapq import heapify, heappop, heappush
from _thread import get_ident, start_new_thread
from collections import deque

from api.aio.scopes import CancelScope

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine, Generator
    from typing import Any, Final, Protocol, TypeVar

    Result = TypeVar("Result")

    class TaskInfo(Protocol):
        """What can be seen of a task."""

        @property
        def name(self) -> str | None:
            """What it does."""

        @property
        def coro(self) -> Any:
            """Its coroutine."""


_READ: Final = select.EPOLLIN | select.EPOLLRDHUP
_WRITE: Final = select.EPOLLOUT
# An end and an error are news for both who would read and who would write.
_ENDS: Final = select.EPOLLHUP | select.EPOLLERR

# So many timers that mean nothing any more may lie among those that do, and as many again.
_STALE: Final = 64

now = time.monotonic


class Cancelled(BaseException):
    """Arises in a task that is cancelled. To be let through."""


class Task:
    """A coroutine that takes turns with others.

    Attributes:
        coro: the coroutine.
        name: what it does.
        scope: the innermost scope that it is in.
        park: takes it out of what it waits for; None while it runs or is about to.
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


class Timer:
    """Something to do at a time, unless it is stopped before.

    Args:
        when: on the loop's clock.
        function: what to call.
    """

    __slots__ = ("function", "when")

    def __init__(self, when: float, function: Callable[[], object]) -> None:
        self.when = when
        self.function: Callable[[], object] | None = function

    def __lt__(self, other: Timer) -> bool:
        return self.when < other.when


class _Waits:
    """Who waits for a descriptor."""

    __slots__ = ("reader", "writer")

    def __init__(self) -> None:
        self.reader: Task | None = None
        self.writer: Task | None = None


class Loop:
    """See the module."""

    def __init__(self) -> None:
        self.current: Task | None = None
        self.tasks: set[Task] = set()
        self.thread = get_ident()
        self._ready: deque[tuple[Task, BaseException | None]] = deque()
        self._timers: list[Timer] = []
        self._stopped = 0
        self._epoll = select.epoll()
        self._waits: dict[int, _Waits] = {}
        # Descriptors that epoll has seen, and perhaps under other files.
        self._seen: set[int] = set()
        self._calls: deque[Callable[[], object]] = deque()
        self._waker = -1

    def close(self) -> None:
        """Release what the loop has of the kernel."""
        self._epoll.close()
        if self._waker >= 0:
            os.close(self._waker)

    def run(self, main: Task) -> BaseException | None:
        """Run tasks until one of them is over.

        Returns:
            What it raised.
        """
        over: list[BaseException | None] = []
        main.ended = over.append
        while not over:
            self._turn()
        return over[0]

    def start(self, task: Task) -> None:
        """Let a new task have its first turn."""
        self.tasks.add(task)
        self._ready.append((task, None))

    def schedule(self, task: Task, error: BaseException | None = None) -> None:
        """Let a parked task go on.

        Args:
            task: the task.
            error: what is to arise where it waits.
        """
        task.park = None
        self._ready.append((task, error))

    def cancel(self, task: Task) -> None:
        """Cancel the wait of a task, if it waits."""
        if task.park is not None and task.park is not unyielding:
            task.park()
            self.schedule(task, Cancelled())

    def _turn(self) -> None:
        ready = self._ready
        for fd, events in self._epoll.poll(0 if ready else self._patience()):
            self._awaited(fd, events)
        if self._timers:
            self._ring()
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
            if take_out is not _scheduled:
                task.park = take_out
                if task.scope.effectively_cancelled:
                    self.cancel(task)
        finally:
            self.current = None

    def _over(self, task: Task, raised: BaseException | None) -> None:
        self.tasks.discard(task)
        task.scope.give(task)
        task.ended(raised)

    # -- times -----------------------------------------------------------------------------

    def at(self, when: float, function: Callable[[], object]) -> Timer:
        """Call a function at a time."""
        timer = Timer(when, function)
        heappush(self._timers, timer)
        return timer

    def stop(self, timer: Timer) -> None:
        """Do not call it after all."""
        if timer.function is None:
            return
        timer.function = None
        self._stopped += 1
        if self._stopped > _STALE + len(self._timers) // 2:
            self._timers = [timer for timer in self._timers if timer.function is not None]
            heapify(self._timers)
            self._stopped = 0

    def _patience(self) -> float | None:
        """How long to wait for descriptors, in seconds; None for ever."""
        timers = self._timers
        while timers and timers[0].function is None:
            heappop(timers)
            self._stopped -= 1
        return max(0.0, timers[0].when - now()) if timers else None

    def _ring(self) -> None:
        timers, clock = self._timers, now()
        while timers and (timers[0].function is None or timers[0].when <= clock):
            timer = heappop(timers)
            function, timer.function = timer.function, None
            if function is None:
                self._stopped -= 1
            else:
                function()

    # -- descriptors -----------------------------------------------------------------------

    def wait(self, fd: int, *, writing: bool) -> _Park:
        """What the current task awaits until a descriptor is ready."""
        task = self.current
        if fd < 0:
            message = "to wait for a descriptor that is closed"
            raise ValueError(message)
        waits = self._waits.get(fd)
        if waits is None:
            waits = self._waits[fd] = _Waits()
        if (waits.writer if writing else waits.reader) is not None:
            message = f"two tasks wait for descriptor {fd}"
            raise RuntimeError(message)
        if writing:
            waits.writer = task
        else:
            waits.reader = task
        try:
            self._arm(fd, waits)
        except OSError:
            self._leave(fd, waits, writing=writing)
            raise

        def take_out() -> None:
            self._leave(fd, waits, writing=writing)
            try:
                self._arm(fd, waits)
            except OSError:
                self._seen.discard(fd)  # closed meanwhile

        return _Park(take_out)

    def _leave(self, fd: int, waits: _Waits, *, writing: bool) -> None:
        if writing:
            waits.writer = None
        else:
            waits.reader = None
        if waits.reader is None and waits.writer is None and self._waits.get(fd) is waits:
            del self._waits[fd]

    def _arm(self, fd: int, waits: _Waits) -> None:
        wanted = _READ if waits.reader is not None else 0
        if waits.writer is not None:
            wanted |= _WRITE
        if not wanted:
            self._seen.discard(fd)
            self._epoll.unregister(fd)
            return
        wanted |= select.EPOLLONESHOT
        if fd in self._seen:
            try:
                self._epoll.modify(fd, wanted)
            except FileNotFoundError:
                pass  # another file has the number now
            else:
                return
        self._epoll.register(fd, wanted)
        self._seen.add(fd)

    def _awaited(self, fd: int, events: int) -> None:
        if fd == self._waker:
            self._called()
            return
        waits = self._waits.get(fd)
        if waits is None:
            return
        woken = []
        if waits.reader is not None and events & (_READ | _ENDS):
            woken.append(waits.reader)
            waits.reader = None
        if waits.writer is not None and events & (_WRITE | _ENDS):
            woken.append(waits.writer)
            waits.writer = None
        if waits.reader is None and waits.writer is None:
            del self._waits[fd]
        else:
            self._arm(fd, waits)
        for task in woken:
            self.schedule(task)

    # -- threads ---------------------------------------------------------------------------

    def expect_calls(self) -> None:
        """Get ready for :meth:`call_from_thread`, in the loop's own thread."""
        if self._waker < 0:
            waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            try:
                self._epoll.register(waker, select.EPOLLIN)
            except OSError:
                os.close(waker)
                raise
            self._waker = waker

    def call_from_thread(self, function: Callable[[], object]) -> None:
        """Call a function in the loop's thread."""
        self._calls.append(function)
        os.eventfd_write(self._waker, 1)

    def _called(self) -> None:
        os.eventfd_read(self._waker)
        while self._calls:
            self._calls.popleft()()


_current: Loop | None = None


def unyielding() -> None:
    """Parks a task where it cannot be cancelled."""


def _scheduled() -> None:
    """Parks a task that is scheduled already."""


def running() -> bool:
    """Whether this thread runs a loop of ours."""
    return _current is not None and _current.thread == get_ident()


def exists() -> bool:
    """Whether any thread does."""
    return _current is not None


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
    loop = current()
    loop.schedule(current_task())
    await _Park(_scheduled)


async def sleep(delay: float) -> None:
    """Wait for some seconds."""
    if delay <= 0:
        await checkpoint()
        return
    loop, task = current(), current_task()
    if delay == math.inf:
        await _Park(_nothing)
        return
    timer = loop.at(now() + delay, lambda: loop.schedule(task))
    await _Park(lambda: loop.stop(timer))


def _nothing() -> None:
    """There is nothing that a task would have to be taken out of."""


async def wait_readable(what: socket.socket | int) -> None:
    """Wait until there is something to read."""
    fd = what if isinstance(what, int) else what.fileno()
    await current().wait(fd, writing=False)


async def wait_writable(what: socket.socket | int) -> None:
    """Wait until something can be written."""
    fd = what if isinstance(what, int) else what.fileno()
    await current().wait(fd, writing=True)


def running_tasks() -> list[Task]:
    """The tasks that are not over."""
    return list(current().tasks)


async def run_in_thread(function: Callable[[], Result]) -> Result:
    """Call a function in a thread of its own; if the task is cancelled, the thread goes on."""
    loop, task = current(), current_task()
    loop.expect_calls()
    results: list[Result] = []
    errors: list[BaseException] = []
    waiting = [task]

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - it arises where the thread is waited for
            errors.append(error)
        loop.call_from_thread(finish)

    def finish() -> None:
        if waiting:
            loop.schedule(waiting.pop())

    start_new_thread(work, ())
    await _Park(waiting.clear)
    if errors:
        raise errors[0]
    return results[0]


def call_from_thread(function: Callable[[], object]) -> None:
    """Have a function called in the loop's thread."""
    current().call_from_thread(function)


def run(function: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any) -> Result:
    """Run a coroutine function in a loop of its own, until it is over.

    Args:
        function: the function; called here.
        arguments: what it is called with.

    Returns:
        What it returns.

    Raises:
        RuntimeError: a loop is running already.
    """
    global _current  # noqa: PLW0603 - there is one loop in a process
    if _current is not None:
        message = "a loop is running already"
        raise RuntimeError(message)
    loop = Loop()
    _current = loop
    try:
        main = Task(function(*arguments), "main", CancelScope(), _ignore)
        loop.start(main)
        raised = loop.run(main)
        if raised is not None:
            raise raised
        result: Result = main.result
        return result
    finally:
        _current = None
        loop.close()


def _ignore(_: BaseException | None) -> None:
    """Until a loop runs it."""
