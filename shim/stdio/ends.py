"""Descriptors of fifos and pipes. No function here waits for the process at the other end."""

from __future__ import annotations

import fcntl
import os
import select
import stat
import termios
from typing import TYPE_CHECKING

from shim.errors import StdioUnavailable, remedy_of

if TYPE_CHECKING:
    from collections.abc import Iterator


class Descriptors:
    """Descriptors that are closed together, once."""

    __slots__ = ("_fds",)

    def __init__(self) -> None:
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
            os.close(self._fds.pop())


class Opening:
    """Turns an OSError of an open into a :class:`StdioUnavailable`.

    Args:
        role: what is opened: "stdin".
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
                do=remedy_of(error, self._do),
            ) from error


def is_fifo(path: str) -> bool:
    """Whether a path leads to a fifo."""
    return stat.S_ISFIFO(os.stat(path).st_mode)


def open_fifo(path: str) -> tuple[int, int]:
    """A non-blocking read end and a blocking write end of a fifo."""
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return reading, os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except BaseException:
        os.close(reading)
        raise


def waiting_bytes(fd: int) -> int:
    """How many bytes wait to be read from a pipe or terminal."""
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), "little")


def state_of(fd: int, events: int = 0) -> int:
    """The state of a descriptor, as poll(2) reports it at this moment.

    Args:
        fd: the descriptor.
        events: what to ask for besides errors and hangups.
    """
    poll = select.poll()
    poll.register(fd, events)
    return sum(state for _, state in poll.poll(0))
