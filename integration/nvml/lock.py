"""Who of us has NVML open, and who needs it closed: a lock in the state directory.

A process that has NVML open has every GPU open. nvidia-smi resets none that anybody has open, and
does not switch its MIG mode. So whatever we start that opens NVML shares the lock for as long as it
lives; who resets a GPU, or switches its mode, has the lock alone meanwhile. That waits for those
who are about to open NVML, which nobody can see yet, and keeps others from it.

Rules
- The lock goes with an open file that children inherit: it is held as long as one of them lives,
  whoever has started it is killed meanwhile.
- Who cannot have it in time does not ask NVML, as if that did not answer.
- A child that waits in the kernel does not end when it is killed, and would keep NVML closed until
  the next boot. :func:`give_up` removes the file, and the next process gets a new lock.
- Who may not open the file, since he is not root, goes without: nobody else can hold it up, either.

Source: flock(2).
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from shim.causes.agent import is_locked

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NONE", "alone", "give_up", "is_alone", "locked", "opening"]

NONE: Final = -1
"""In the place of a descriptor: there is no lock."""

_FILE: Final = "nvml.lock"
_POLL: Final = 0.01


@contextmanager
def opening(state: str, seconds: float) -> Iterator[int | None]:
    """May NVML be opened, and stay open as long as this lasts, or a child that inherits it.

    Args:
        state: the directory ``state`` of the configuration.
        seconds: to wait for whoever needs it closed.

    Yields:
        The descriptor of the lock, for a child to inherit; :data:`NONE` if there is no lock to be
        had; None if NVML is not to be opened now.
    """
    try:
        fd = os.open(_path(state), os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield NONE
        return
    try:
        yield fd if locked(fd, fcntl.LOCK_SH, seconds) else None
    finally:
        os.close(fd)


@contextmanager
def alone(state: str, seconds: float) -> Iterator[int | None]:
    """Have nobody of us open NVML, as long as this lasts, or a child that inherits it.

    Args:
        state: the directory ``state`` of the configuration.
        seconds: to wait for those who have it open.

    Yields:
        The descriptor of the lock, for a child to inherit; None if somebody has it open still.

    Raises:
        OSError: there is no place for the lock.
    """
    os.makedirs(state, mode=0o711, exist_ok=True)
    fd = os.open(_path(state), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield fd if locked(fd, fcntl.LOCK_EX, seconds) else None
    finally:
        os.close(fd)


def is_alone(state: str) -> bool:
    """Whether somebody needs NVML closed now."""
    return is_locked(_path(state))


def give_up(state: str) -> None:
    """Let NVML be opened again, though a process that does not end still has the lock alone.

    Args:
        state: the directory ``state`` of the configuration.
    """
    with suppress(OSError):
        os.unlink(_path(state))


def locked(fd: int, kind: int, seconds: float) -> bool:
    """Lock a file; whether that was to be had in time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL)
        else:
            return True


def _path(state: str) -> str:
    return os.path.join(state, _FILE)
