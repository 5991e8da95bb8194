"""Opening fifos and files: never waiting for anyone, never following where others may lead."""

from __future__ import annotations

import fcntl
import os
import select
import stat
import termios

from api import aio
from shim.errors import StdioUnavailable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

# Seconds that a client is waited for which has not opened its end when the process has ended.
# It may be slow on a loaded machine, and what is in a fifo that nobody has open is lost.
_READER_SECONDS: Final = 2.0
_READER_POLL_SECONDS: Final = 0.01
_LONGEST_POLL_SECONDS: Final = 1.0
# Seconds that one is waited for which reads, and after how many looks it is taken for one that
# does not.
_TAKING_SECONDS: Final = 0.5
_STALLED: Final = 5

_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Descriptors:
    """Descriptors that are closed together, once."""

    __slots__ = ("_fds",)

    def __init__(self) -> None:
        self._fds: list[int] = []

    def keep(self, fd: int) -> int:
        """Close ``fd`` when the others are closed."""
        self._fds.append(fd)
        return fd

    def release(self, fd: int) -> int:
        """Leave ``fd`` open: it is somebody else's from now on."""
        self._fds.remove(fd)
        return fd

    def close(self) -> None:
        """Close them all; a second call does nothing."""
        while self._fds:
            os.close(self._fds.pop())


class KeptEnd:
    """A read end of a fifo that others write to, kept so that there always is one.

    When nobody writes any more it may become a write end. That holds what is in the fifo too, lets
    a client that comes late open the fifo, and shows whether there is a client: a write end is in
    error if nobody reads.

    Args:
        fd: the read end; ours from now on.
    """

    __slots__ = ("_ended_at", "_fd", "_writes")

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        self._writes = False
        self._ended_at: float | None = None

    async def taken(self) -> bool:
        """Give a client that takes what is in the fifo a moment for it; none if there is nobody.

        To be called when nobody writes any more, before the end is told.

        Returns:
            Whether something is left that nobody has come for.
        """
        self._ended_at = aio.current_time()
        if self._fd is None or not waiting_bytes(self._fd):
            return False
        if self._nobody_reads():
            return True
        await self._while_taken(self._fd)
        self.close()  # or the client would wait for an end that we alone hold up
        return False

    async def hand_over(self) -> None:
        """Hold what is in the fifo until a client comes, be it days later, and let it have the end.

        containerd may be restarting; its own shim waits for its client before it makes the process,
        for ever.
        """
        pause = _READER_POLL_SECONDS
        while self._fd is not None and waiting_bytes(self._fd) and self._nobody_reads():
            await aio.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL_SECONDS)
        self._close_if_it_writes()

    async def wait_for_reader(self) -> None:
        """If something is in the fifo, give a client the time to come for it, but not long."""
        began = aio.current_time() if self._ended_at is None else self._ended_at
        while self._fd is not None and waiting_bytes(self._fd):
            if not self._nobody_reads():
                await self._while_taken(self._fd)
                break
            if aio.current_time() >= began + _READER_SECONDS:
                return
            await aio.sleep(_READER_POLL_SECONDS)
        self._close_if_it_writes()

    async def close_when_empty(self) -> None:
        """Close it as soon as nothing is in the fifo; if that takes long, it stays open."""
        with aio.move_on_after(_READER_SECONDS):
            while self._fd is not None and waiting_bytes(self._fd):
                await aio.sleep(_READER_POLL_SECONDS)
            if not self._writes:  # or it is closed when somebody has read it
                self.close()

    def _close_if_it_writes(self) -> None:
        """Let a client that has come have the end."""
        if self._writes:
            self.close()

    def _nobody_reads(self) -> bool:
        """Whether nobody has the fifo open to read; what we have is a write end from now on."""
        if self._fd is None:
            return False
        if not self._writes:
            path = f"/proc/self/fd/{self._fd}"
            writing = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self.close()
            self._fd, self._writes = writing, True
        poll = select.poll()
        poll.register(self._fd, 0)
        return bool(poll.poll(0))

    async def _while_taken(self, fd: int) -> None:
        """Wait while a client takes what is in the fifo.

        containerd before 1.6.22 closes its end when it is told of a container's exit, read or not.
        """
        left, stalled = waiting_bytes(fd), 0
        with aio.move_on_after(_TAKING_SECONDS):
            while left and stalled < _STALLED:
                await aio.sleep(_READER_POLL_SECONDS)
                if self._fd != fd:
                    return
                before, left = left, waiting_bytes(fd)
                stalled = 0 if left < before else stalled + 1

    def close(self) -> None:
        """Close it; a second call does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def waiting_bytes(fd: int) -> int:
    """How much is in a pipe or terminal, waiting to be read."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), "little")


class Opening:
    """Turns an OSError of an open into one line for whoever named the path.

    Args:
        role: what is opened, in the reader's words.
        path: where it is.
        do: what can be done about it.
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
                do=self._do,
            ) from error


def is_fifo(path: str) -> bool:
    """Whether a path leads to a fifo."""
    return stat.S_ISFIFO(os.stat(path).st_mode)


def open_fifo(path: str) -> tuple[int, int]:
    """A non-blocking read end and a blocking write end of a fifo, without waiting for anyone."""
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return reading, os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except BaseException:
        os.close(reading)
        raise


def pipe_for(other: int) -> tuple[int, int]:
    """A pipe's read end and write end, to pass on to or from a descriptor.

    Args:
        other: that descriptor; closed if there is no pipe to be had.
    """
    try:
        return os.pipe2(os.O_CLOEXEC)
    except OSError:
        os.close(other)
        raise


def open_existing_file(path: str) -> int:
    """A file that is there, to append to."""
    return _blocking(os.open(path, _APPEND), path)


def open_log_file(path: str) -> int:
    """A file to append to. It and the directories on the way to it are made if missing.

    The last name may not be a link: a log's directory is often one that a container can write
    to, and what it wrote would go wherever it points the link.

    Raises:
        StdioUnavailable: it cannot be opened, is a link, or something that no log can be.
    """
    with Opening("the log file", path, do="check the path, and what its directory allows"):
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        if os.path.islink(path):
            raise StdioUnavailable(
                f"the log file {path}", found="a symbolic link", do="name the file that it leads to"
            )
        return _blocking(os.open(path, _APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644), path)


def _blocking(fd: int, path: str) -> int:
    kind = os.fstat(fd).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISCHR(kind)):
        os.close(fd)
        raise StdioUnavailable(
            f"the log file {path}", found="it is no regular file", do="name another path"
        )
    os.set_blocking(fd, True)
    return fd
