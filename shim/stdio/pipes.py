"""Descriptors of pipes, fifos and terminals, and passing data on from one to another.

No function here waits for the process at the other end.

Between pipes the kernel moves pages (splice(2)), so no byte is copied. Small amounts are still
copied: a moved page takes one of a pipe's sixteen slots even for a few bytes, so sixteen short
lines would fill a fifo without a reader.

A relay buffers at most one read: if the reader is slow, the writer waits.

A process that sends a file into its pipe with sendfile(2), as busybox's cat does, has the pipe
locked while it waits for the file. Then every call for the pipe except poll(2) also waits, whatever
its flags, and no signal ends it. So where a file may wait for another machine or process, the relay
makes its calls in a thread (:meth:`Relay.use_threads`).

Source: splice(2), pipe(7), tty_ioctl(4); kernel fs/splice.c splice_file_to_pipe, fs/pipe.c.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import stat
import termios
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from shim import loop
from shim.errors import StdioUnavailable, remedy_of
from shim.loop import Tasks

_CHUNK: Final = 1 << 16

# The fewest waiting bytes for moving pages, and the most to move at once.
_WORTH_MOVING: Final = 1 << 14
_MOST: Final = 1 << 20

# The size of both pipes for large amounts, if the kernel allows it: four times its default, for a
# third of the wake-ups. Most execs print only a few lines.
_PIPE_SIZE: Final = 1 << 18

# The size of a sink for the last output, in bytes: its content, its source's and a read's.
_LAST_SIZE: Final = 1 << 20

# Bytes and steps before other tasks get a turn, because source and sink may always be ready.
_TURN_BYTES: Final = 1 << 20
_TURN_STEPS: Final = 64


class Descriptors:
    """Descriptors to close together, and only once.

    Args:
        close: closes one of them.
    """

    __slots__ = ("_close", "_fds")

    def __init__(self, close: Callable[[int], None] = os.close) -> None:
        self._close = close
        self._fds: list[int] = []

    def keep(self, fd: int) -> int:
        """Close ``fd`` when the others are closed."""
        self._fds.append(fd)
        return fd

    def __iter__(self) -> Iterator[int]:
        return iter(self._fds)

    def close(self) -> None:
        """Close them all; a second call does nothing."""
        while self._fds:
            self._close(self._fds.pop())


class Opening:
    """Converts an OSError from opening to :class:`StdioUnavailable`.

    Args:
        role: the stream's name: "stdin".
        path: the opened path.
        do: the remedy.
    """

    __slots__ = ("_do", "_path", "_role")

    def __init__(
        self,
        role: str,
        path: str,
        do: str = "containerd's client has to make the fifo before it creates the task",
    ) -> None:
        self._role = role
        self._path = path
        self._do = do

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError):
            raise StdioUnavailable(
                f"{self._role} at {self._path}",
                found=error.strerror or str(error),
                do=remedy_of(error, self._do),
            ) from error


def is_fifo(path: str) -> bool:
    """Whether a path leads to a fifo."""
    return stat.S_ISFIFO(os.stat(path).st_mode)


class FifoEnds(NamedTuple):
    """Both ends of a fifo."""

    reading: int  # does not block
    writing: int  # blocks
    # whether a process had it open for reading before us, or waited in open(2) for that
    had_reader: bool


def open_fifo(path: str) -> FifoEnds:
    """Open both ends of a fifo.

    Raises:
        OSError: one of them cannot be opened.
    """
    reading = writing = -1
    try:
        # Keep it open, or a reader that waits in open(2) would see the end of the output at once.
        writing = _open_for_reader(path)
        reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        had_reader = writing >= 0
        if had_reader:
            os.set_blocking(writing, True)
        else:
            writing = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except BaseException:
        for fd in (reading, writing):
            if fd >= 0:
                os.close(fd)
        raise
    return FifoEnds(reading, writing, had_reader)


def _open_for_reader(path: str) -> int:
    """Open a fifo for writing if it has a reader; otherwise return -1."""
    try:
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return -1


def waiting_bytes(fd: int) -> int:
    """Return the number of bytes to read from a pipe or terminal."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), "little")


def state_of(fd: int, events: int = 0) -> int:
    """Return the current state of a descriptor, from poll(2).

    Args:
        fd: the descriptor.
        events: the events to query, besides errors and hangups.
    """
    poll = select.poll()
    poll.register(fd, events)
    return sum(state for _, state in poll.poll(0))


class Relay:
    """Passes data from one descriptor to another, to the end or until :meth:`finish`.

    Args:
        source: the descriptor to read, now owned by the relay.
        sink: the descriptor to write, now owned by the relay, which closes it after the source's
            end.
        last: called after the source's end; its result is written.
        close: closes one of the two, for a descriptor that two relays share.

    Attributes:
        done: set when the relay has ended.
        passed: the number of bytes passed on.
    """

    def __init__(
        self,
        source: int,
        sink: int,
        *,
        last: Callable[[], bytes] | None = None,
        close: Callable[[int], None] = os.close,
    ) -> None:
        self.done = loop.Event()
        self.passed = 0
        self._ours = Descriptors(close)
        self._source = self._ours.keep(source)
        self._sink = self._ours.keep(sink)
        self._last = last
        for fd in (source, sink):
            os.set_blocking(fd, False)
        self._moves = _is_pipe(source) and _is_pipe(sink)
        self._enlarged = not self._moves
        self._rest = memoryview(b"")
        self._sink_is_full = False
        self._finishing = False
        self._running = False
        self._in_threads = False
        self._whole = loop.CancelScope()
        self._waiting: loop.CancelScope | None = None

    def use_threads(self) -> None:
        """Read in threads, because the source may be locked for long. Call this before a start."""
        self._in_threads = True
        self._enlarged = True  # which needs the lock, too

    def start(self, tasks: Tasks) -> None:
        """Start."""
        self._running = True
        tasks.start_soon(self._run)

    def finish(self) -> None:
        """Pass on the available data, and then end, even if writers remain.

        A sink that is a pipe is enlarged to fit, so that no reader is needed: data in a pipe
        outlives us while a reader has it open; in a terminal it does not.
        """
        self._finishing = True
        if not self.done.is_set():
            _enlarge(self._sink, _LAST_SIZE)
        if self._waiting is not None:
            self._waiting.cancel()

    def stop(self) -> None:
        """End now."""
        if self._running:
            # The task closes them at its end. If one were closed during a wait, another file could
            # get its number, and the loop would forget that file's readiness.
            self._whole.cancel()
        else:
            self._ours.close()

    async def _run(self) -> None:
        try:
            with self._whole:
                await self._pass_on()
        finally:
            self._ours.close()
            self.done.set()

    async def _pass_on(self) -> None:
        count = steps = 0
        while True:
            try:
                passed = await self._step_in_thread() if self._in_threads else self._step()
            except BlockingIOError:
                if not await self._until_ready():
                    return
                count = steps = 0
                continue
            except OSError:
                # EIO: no process has the terminal open. EPIPE: the process has closed its stdin;
                # output always has our read end.
                return
            if not passed:
                return
            self.passed += passed
            count += passed
            steps += 1
            if count >= _TURN_BYTES or steps >= _TURN_STEPS:
                await loop.checkpoint()
                count = steps = 0

    async def _step_in_thread(self) -> int:
        # Shielded, because the descriptors must stay open until the thread has ended.
        with loop.CancelScope(shield=True):
            try:
                passed = await loop.run_in_thread(self._step)
            except RuntimeError:  # no thread can be started
                passed = self._step()
        return passed

    def _step(self) -> int:
        """Pass on once; return the number of bytes, 0 at the source's end."""
        self._sink_is_full = True  # if the next step blocks
        if not self._rest:
            if self._moves and waiting_bytes(self._source) >= _WORTH_MOVING:
                self._enlarge()
                return os.splice(self._source, self._sink, _MOST, flags=os.SPLICE_F_NONBLOCK)
            self._sink_is_full = False
            self._rest = memoryview(os.read(self._source, _CHUNK) or self._take_last())
            if not self._rest:
                return 0
            self._sink_is_full = True
        written = os.write(self._sink, self._rest)
        self._rest = self._rest[written:]
        return written

    def _take_last(self) -> bytes:
        last, self._last = self._last, None
        return last() if last is not None else b""

    async def _until_ready(self) -> bool:
        """Wait for the side that was not ready; return whether more data is possible."""
        if self._sink_is_full and self._enlarge():
            return True
        if self._finishing and not self._sink_is_full:
            return False
        with loop.CancelScope() as self._waiting:
            if self._sink_is_full:
                await loop.wait_writable(self._sink)
            else:
                await loop.wait_readable(self._source)
        self._waiting = None
        return True

    def _enlarge(self) -> bool:
        """Enlarge both pipes at the first large amount; return whether this was the first time."""
        if self._enlarged:
            return False
        self._enlarged = True
        for pipe in (self._source, self._sink):
            _enlarge(pipe, _PIPE_SIZE)
        return True


def _enlarge(pipe: int, size: int) -> None:
    try:
        if fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) < size:
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, size)
    except OSError:
        pass  # not a pipe, or root's share is used up (pipe(7), pipe-user-pages-soft)


def _is_pipe(fd: int) -> bool:
    return stat.S_ISFIFO(os.fstat(fd).st_mode)
