"""What a process does that was forked from the shim and stays in Python for a moment.

It has inherited the loop's signal handlers and descriptors, of which it needs none, and it may
raise to nobody: it tells over a pipe, in one line, what failed, and ends by ``os._exit``.

Source: fork(2), prctl(2) PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Final, NoReturn

from api.errors import one_line
from shim import syscalls

if TYPE_CHECKING:
    from collections.abc import Callable

FAILED: Final = b"!"
"""What a line begins with that tells of a failure."""


def fork(child: Callable[[], NoReturn]) -> int:
    """Fork, with no signal handled in the child by what it has inherited of the loop.

    Args:
        child: what the child does; it never returns.

    Returns:
        The child's pid.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            child()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def begin(shim: int, kept: set[int]) -> None:
    """Be a process of one's own: without the loop's signals and files, ending with the shim.

    Args:
        shim: the pid of who forked.
        kept: the descriptors that stay open.
    """
    forget_signals()
    syscalls.die_with_parent(signal.SIGKILL)
    if os.getppid() != shim:
        os._exit(1)
    close_others(kept)


def forget_signals() -> None:
    """Handle no signal any more."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            continue  # KILL, STOP, and those that libc keeps for itself


def close_others(kept: set[int]) -> None:
    """Close all descriptors but some."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                pass  # the descriptor that listed them


def fail(report: int, doing: str, error: BaseException) -> NoReturn:
    """Tell what failed, and end.

    Args:
        report: where it is told.
        doing: what was being done.
        error: what stood in the way.
    """
    try:
        os.write(report, FAILED + one_line(f"{doing}: {reason(error)}").encode())
    finally:
        os._exit(1)


def reason(error: BaseException) -> str:
    """What stood in the way, in the kernel's words where they are."""
    if not isinstance(error, OSError):
        return str(error)
    return os.strerror(error.errno).lower() if error.errno else str(error.strerror)
