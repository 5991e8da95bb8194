"""What tasks wait for: events, locks, points in time, descriptors, threads.

Signals and sockets need no task: the loop calls a function for them.
"""

from __future__ import annotations

import math
import os
import signal
import socket
from _thread import start_new_thread
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Final, TypeVar

from shim.handlers import restore_handlers
from shim.loop import core
from shim.loop.core import ENDS, READ, WRITE, Loop, Task

Result = TypeVar("Result")

# The most signals to read at once.
_MANY: Final = 256

# The size of a channel's reads, below glibc's threshold for a separate mapping.
_READ_SIZE: Final = 64 << 10
# Bytes kept for a peer that does not read until a channel is crowded.
_ROOM: Final = 1 << 20


class Event:
    """Happens once; any number of tasks can wait for it."""

    __slots__ = ("_set", "_waiting")

    def __init__(self) -> None:
        self._set = False
        self._waiting: dict[Task, None] | None = None

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._set

    def set(self) -> None:
        """Wake all tasks that wait, now and later."""
        self._set = True
        waiting, self._waiting = self._waiting, None
        if waiting:
            loop = core.current()
            for task in waiting:
                loop.schedule(task)

    async def wait(self) -> None:
        """Return when it has happened."""
        if self._set:
            core.raise_if_cancelled()
            return
        task = core.current_task()
        if self._waiting is None:
            self._waiting = {}
        waiting = self._waiting
        waiting[task] = None
        await core.park(lambda: waiting.pop(task))


class Lock:
    """Held by one task at a time, in the order of the requests."""

    __slots__ = ("_holder", "_waiting")

    def __init__(self) -> None:
        self._holder: Task | None = None
        self._waiting: deque[Task] | None = None

    async def acquire(self) -> None:
        """Wait until the lock is free, and acquire it.

        Raises:
            RuntimeError: the task already holds the lock.
        """
        task = core.current_task()
        core.raise_if_cancelled()
        if self._holder is None:
            self._holder = task
            return
        if self._holder is task:
            message = "a task waits for a lock that it holds"
            raise RuntimeError(message)
        if self._waiting is None:
            self._waiting = deque()
        waiting = self._waiting
        waiting.append(task)
        await core.park(lambda: waiting.remove(task))

    def release(self) -> None:
        """Release the lock to the next task that waits.

        Raises:
            RuntimeError: the task does not hold the lock.
        """
        if self._holder is not core.current_task():
            message = "a task releases a lock that it does not hold"
            raise RuntimeError(message)
        if self._waiting:
            self._holder = self._waiting.popleft()
            core.current().schedule(self._holder)
        else:
            self._holder = None

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


async def checkpoint() -> None:
    """Yield to the other tasks once. A cancellation point."""
    core.raise_if_cancelled()
    await core.park(core.another_turn)
    core.raise_if_cancelled()


async def sleep(delay: float) -> None:
    """Wait for some seconds.

    Raises:
        ValueError: the delay is negative or not a number.
    """
    if delay == 0:
        await checkpoint()
        return
    if delay == math.inf:
        await core.park(_nothing)
        return
    if not delay > 0:
        message = "sleep for a negative time"
        raise ValueError(message)
    loop, task = core.current(), core.current_task()
    timer = loop.timers.at(core.now() + delay, lambda: loop.schedule(task))
    await core.park(lambda: loop.timers.stop(timer))


def _nothing() -> None:
    """Do nothing: a task that sleeps for ever is not registered anywhere."""


async def wait_readable(what: socket.socket | int) -> None:
    """Wait until a descriptor is readable, at end of file, or in error."""
    await _wait(what, writing=False)


async def wait_writable(what: socket.socket | int) -> None:
    """Wait until a descriptor is writable, or in error."""
    await _wait(what, writing=True)


def _wait(what: socket.socket | int, *, writing: bool) -> Awaitable[None]:
    core.raise_if_cancelled()
    fd = what if isinstance(what, int) else what.fileno()
    descriptors = core.current().descriptors
    descriptors.wait(fd, core.current_task(), writing=writing)
    return core.park(lambda: descriptors.forget(fd, writing=writing))


def watch(fd: int, function: Callable[[int], object], events: int = READ) -> None:
    """Call a function whenever a descriptor is ready; see :meth:`Descriptors.watch`.

    The function runs outside of any task: it must not wait, and an exception in it ends the loop.
    """
    core.current().descriptors.watch(fd, function, events)


def unwatch(fd: int) -> None:
    """Stop watching. Call this before closing the descriptor."""
    core.current().descriptors.unwatch(fd)


@contextmanager
def handle_signals(handlers: Mapping[int, Callable[[], object]]) -> Iterator[None]:
    """Make the loop call a function for signals; several of a kind may result in one call.

    The interpreter's own handler writes the numbers into a pipe. The functions run outside of any
    task, as with :func:`watch`.

    Args:
        handlers: the functions, by signal number.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    # Before the handlers, or signals in between would be lost.
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _pass) for number in handlers}

    def read(_: int) -> None:
        for number in dict.fromkeys(os.read(reading, _MANY)):
            if number in handlers:
                handlers[number]()

    watch(reading, read)
    try:
        yield
    finally:
        unwatch(reading)
        restore_handlers(before)
        signal.set_wakeup_fd(wakeup)
        os.close(reading)
        os.close(writing)


def _pass(_: int, __: object) -> None:
    """Do nothing; the reader of the pipe does the work."""


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
        """Run in the thread."""
        try:
            self.result = self.function()
        except BaseException as error:  # noqa: BLE001 - raised where the thread is waited for
            self.error = error
        try:
            self.loop.call_from_thread(self.finish)
        except RuntimeError:
            self.error = None  # the loop and the waiting task have ended

    def finish(self) -> None:
        """Run in the loop when the thread has ended."""
        task, self.waiting = self.waiting, None
        if task is None:
            self.error = None  # the wait was cancelled; the traceback refers to this object
        else:
            self.loop.schedule(task)

    def forget(self) -> None:
        """Run in the loop when the wait was cancelled."""
        self.waiting = None


async def run_in_thread(function: Callable[[], Result]) -> Result:
    """Call a function in a new thread, which continues if the task is cancelled.

    Raises:
        RuntimeError: no thread can start, or no descriptor is left to wake the loop.
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


class Channel:
    """A connected stream socket that the loop reads without a task.

    A subclass gets incoming bytes in :meth:`received`. :meth:`write` never waits: it passes the
    bytes to the kernel, and keeps those that the kernel does not accept. While it keeps more than a
    megabyte, the channel is not read, so a peer that does not read its answers cannot send more
    requests.

    Args:
        sock: a connected socket. It becomes non-blocking, and :meth:`close` closes it.

    Raises:
        OSError: it cannot be watched.
    """

    __slots__ = ("_drained", "_events", "_fd", "_kept", "_reading", "_sock", "_unsent")

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        self._unsent: deque[bytes | memoryview] | None = None
        self._kept = 0
        self._drained: Event | None = None
        self._reading = True
        self._events = READ
        watch(self._fd, self._ready, READ)

    def received(self, data: bytes) -> None:
        """Handle incoming bytes; called once with none at the end of the connection."""
        raise NotImplementedError

    def failed(self, error: Exception) -> None:
        """Handle an exception from :meth:`received`."""
        raise NotImplementedError

    def flushed(self) -> None:
        """Handle that the kernel has accepted all kept bytes."""

    @property
    def crowded(self) -> bool:
        """Whether it keeps too much for a peer that does not read."""
        return self._kept > _ROOM

    @property
    def kept(self) -> int:
        """The number of bytes that the kernel has not accepted yet."""
        return self._kept

    async def room(self) -> None:
        """Wait while it keeps too much. Also returns when the connection is lost."""
        while self.crowded:
            if self._drained is None:
                self._drained = Event()
            await self._drained.wait()

    def write(self, data: bytes) -> None:
        """Send bytes, now or when the kernel accepts them.

        If the peer is gone, they are dropped; :meth:`received` reports the end.
        """
        if self._fd < 0:
            return
        if self._unsent:
            self._unsent.append(data)
            self._kept += len(data)
        else:
            sent = self._send(data)
            if sent == len(data):
                return
            if self._unsent is None:
                self._unsent = deque()
            self._unsent.append(memoryview(data)[sent:])
            self._kept = len(data) - sent
        self._update()

    def stop_reading(self) -> None:
        """Stop reading; kept bytes are still sent."""
        self._reading = False
        self._update()

    def close(self) -> None:
        """Close the socket, and drop kept bytes."""
        if self._fd < 0:
            return
        self._reading = False
        self._drop()
        self._update()
        self._fd = -1
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # a child may hold a duplicate
        except OSError:
            pass  # the peer has closed it first
        self._sock.close()

    def _ready(self, events: int) -> None:
        try:
            if self._unsent and events & (WRITE | ENDS):
                self._flush()
            if self._events & READ and events & (READ | ENDS):
                try:
                    data = self._sock.recv(_READ_SIZE)
                except (BlockingIOError, InterruptedError):
                    return
                except OSError:
                    data = b""
                if not data:
                    self.stop_reading()
                self.received(data)
        except Exception as error:  # noqa: BLE001 - one connection's failure does not end the loop
            self.failed(error)

    def _flush(self) -> None:
        unsent = self._unsent
        while unsent:
            sent = self._send(unsent[0])
            if sent == len(unsent[0]):
                self._kept -= sent
                unsent.popleft()
            elif sent:
                self._kept -= sent
                unsent[0] = memoryview(unsent[0])[sent:]
            else:
                break
        if not unsent:
            self._drop()
        elif not self.crowded:
            self._wake()
        self._update()
        if not self._kept:
            self.flushed()

    def _send(self, data: bytes | memoryview) -> int:
        """Pass bytes to the kernel; return how many it accepted, all if the peer is gone."""
        try:
            return self._sock.send(data, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(data)

    def _drop(self) -> None:
        self._unsent = None
        self._kept = 0
        self._wake()

    def _wake(self) -> None:
        if self._drained is not None:
            self._drained.set()
            self._drained = None

    def _update(self) -> None:
        # Unwatch an idle channel, or every turn would report a hangup.
        events = READ if self._reading and not self.crowded else 0
        if self._unsent:
            events |= WRITE
        if events == self._events:
            return
        self._events = events
        if events:
            watch(self._fd, self._ready, events)
        else:
            unwatch(self._fd)
