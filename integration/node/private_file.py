"""Keep a file open in a thread that has descriptors of its own.

The kernel closes the files of a process with the last of its threads. A thread that waits for a
file system that does not answer outlives SIGKILL, and so would a lock by flock(2) that the process
holds: the process is a zombie for good, and its lock is held.

Therefore a thread holds such a file alone. It does nothing but wait in user space, so SIGKILL and
exit_group(2) end it at once, and the kernel closes its file then. No other thread runs the
program's code any more by that time: the kernel has given the signal to all of them, and one that
still waits in the kernel dies on its way out.

Source: unshare(2), CLONE_FILES; flock(2); signal(7); kernel/signal.c, zap_other_threads().
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from shim import syscalls

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["keep_private"]


def keep_private(fd: int) -> Callable[[], None]:
    """Move an open file to a thread that shares no descriptors with the others.

    Args:
        fd: a descriptor of it. This closes it for all threads but that one. Where the kernel does
            not allow that (seccomp), the file stays open in the whole process.

    Returns:
        A function that closes the file; to be called once.
    """
    moved, wanted, closed = threading.Event(), threading.Event(), threading.Event()
    shared: list[OSError] = []

    def keep() -> None:
        try:
            syscalls.unshare(syscalls.CLONE_FILES)
        except OSError as error:
            shared.append(error)
        else:
            _close_all_but(fd)
        moved.set()
        wanted.wait()
        os.close(fd)
        closed.set()

    def close() -> None:
        wanted.set()
        closed.wait()

    threading.Thread(target=keep, name="private-file", daemon=True).start()
    moved.wait()
    if not shared:
        os.close(fd)
    return close


def _close_all_but(fd: int) -> None:
    """Close the thread's copies of what other threads have open."""
    for name in os.listdir("/proc/thread-self/fd"):
        if int(name) != fd:
            try:
                os.close(int(name))
            except OSError:
                pass  # the descriptor that listed them
