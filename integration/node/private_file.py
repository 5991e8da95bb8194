"""Keep a file open in one thread only, with a descriptor table of its own.

The kernel closes the files of a process when its last thread exits. A thread that waits for a hung
file system outlives SIGKILL. The process then stays as a zombie, and keeps its locks by flock(2).

Therefore such a file is open in one thread only. That thread does nothing but wait for an event, so
SIGKILL and exit_group(2) end it at once, and the kernel closes its file. The lock is not released
too early: the kernel has sent SIGKILL to all other threads first, and one that is still waiting in
the kernel dies before it returns to user space.

The thread blocks all signals, since it has no descriptor with which a handler could wake the event
loop.

Source: unshare(2), CLONE_FILES; flock(2); signal(7); kernel/signal.c, zap_other_threads().
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from shim import syscalls

__all__ = ["keep_private"]


def keep_private(fd: int) -> Callable[[], None]:
    """Move an open file to a thread that shares no descriptors with the others.

    Args:
        fd: a descriptor of the file. It is closed for all threads except that one. If the kernel
            does not allow this (seccomp), the file stays open in the whole process.

    Returns:
        A function that closes the file; call it once.
    """
    started, closing, closed = threading.Event(), threading.Event(), threading.Event()
    moved = False

    def keep() -> None:
        nonlocal moved
        try:
            syscalls.unshare(syscalls.CLONE_FILES)
            _close_all_but(fd)
            moved = True
        except OSError:
            return  # its copies are closed with this thread
        finally:
            started.set()
        closing.wait()
        os.close(fd)
        closed.set()

    def close() -> None:
        if moved:
            closing.set()
            closed.wait()
        else:
            os.close(fd)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        threading.Thread(target=keep, name="private-file", daemon=True).start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    started.wait()
    if moved:
        os.close(fd)
    return close


def _close_all_but(fd: int) -> None:
    """Close the thread's copies of the other threads' descriptors."""
    for name in os.listdir("/proc/thread-self/fd"):
        if int(name) != fd:
            try:
                os.close(int(name))
            except OSError:
                pass  # the descriptor that listed them
