"""The lock of NVML: a file in the state directory.

A process that has NVML open has every GPU open. nvidia-smi can reset a GPU, or switch its MIG mode,
only while no process has it open. So each child that opens NVML holds a shared lock for as long as
it lives, and a reset of a GPU or a switch of its mode holds the lock exclusively. To get it, the
holder waits even for children that are about to open NVML, which no list of open files shows yet,
and then keeps others from opening it.

Rules
- Children inherit the open file. The lock is held as long as one of them lives, even if the process
  that started them was killed.
- If a process does not get the lock in time, it does not ask NVML, as if NVML had not answered.
- A child that is stuck in the kernel survives SIGKILL and would keep NVML closed until the next
  boot. :func:`break_lock` removes the file; the next process creates a new one.
- A process that may not open the file, because it is not root, continues without the lock. It
  cannot open NVML in a way that would block a reset, either.

Source: flock(2).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from integration.files import flock_within
from shim.causes.agent import is_locked

__all__ = ["NONE", "break_lock", "exclusive", "is_exclusive", "shared"]

NONE: Final = -1
"""In place of a descriptor: there is no lock."""

_FILE: Final = "nvml.lock"


@contextmanager
def shared(state: str, seconds: float) -> Iterator[int | None]:
    """Hold the lock for a child that opens NVML.

    Args:
        state: the directory ``state`` of the configuration.
        seconds: how long to wait for a process that needs NVML closed.

    Yields:
        The lock's descriptor, for a child to inherit; :data:`NONE` if there is no lock to take;
        None if NVML has to stay closed for now.
    """
    try:
        fd = os.open(_path(state), os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield NONE
        return
    try:
        yield fd if flock_within(fd, fcntl.LOCK_SH, seconds) else None
    finally:
        os.close(fd)


@contextmanager
def exclusive(state: str, seconds: float) -> Iterator[int | None]:
    """Keep NVML closed in all our processes.

    Args:
        state: the directory ``state`` of the configuration.
        seconds: how long to wait for the children that have NVML open.

    Yields:
        The lock's descriptor, for a child to inherit; None if a child still has NVML open.

    Raises:
        OSError: the lock file cannot be created.
    """
    os.makedirs(state, mode=0o711, exist_ok=True)
    fd = os.open(_path(state), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield fd if flock_within(fd, fcntl.LOCK_EX, seconds) else None
    finally:
        os.close(fd)


def is_exclusive(state: str) -> bool:
    """Return whether a process keeps NVML closed now."""
    return is_locked(_path(state))


def break_lock(state: str) -> None:
    """Allow NVML to be opened again while a stuck process still holds the lock exclusively."""
    with suppress(OSError):
        os.unlink(_path(state))


def _path(state: str) -> str:
    return os.path.join(state, _FILE)
