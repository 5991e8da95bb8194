"""Short-lived Python processes, forked from the shim.

Such a process inherits the loop's signal handlers and descriptors without needing them. It must not
raise: it reports a failure in one line over a pipe, and exits with ``os._exit``.

Signals are reset through the C module behind :mod:`signal`, which does not convert numbers to
enumerations: a fork pays for each page that it writes to.

Source: fork(2), prctl(2) PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import signal
from collections.abc import Callable, Iterable
from typing import Final, NoReturn

from api.errors import one_line
from shim import loop, syscalls

FAILED: Final = b"!"
"""The prefix of a line that reports a failure."""

# Created once, for forked processes to share.
_EVERY_SIGNAL: Final = frozenset(_signal.valid_signals())

_LONGEST_REPORT: Final = 1 << 16


def fork(child: Callable[[], NoReturn], blocked: Iterable[int] = _EVERY_SIGNAL) -> int:
    """Fork, and make sure that the child runs none of the inherited signal handlers.

    Args:
        child: the child's function, which never returns.
        blocked: the signals that are blocked at its start.

    Returns:
        The child's pid.
    """
    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, blocked)
    try:
        pid = os.fork()
        if pid == 0:
            child()
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, before)
    return pid


def set_up_child(shim: int, kept: set[int]) -> None:
    """Detach from the loop's signals and files, and exit with the shim.

    Args:
        shim: the pid of the shim that forked.
        kept: the descriptors that stay open.
    """
    reset_signals()
    syscalls.die_with_parent(signal.SIGKILL)
    if os.getppid() != shim:
        os._exit(1)
    close_others(kept)


def lead_group() -> None:
    """Lead a new process group; no signal is handled or blocked, and SIGPIPE is ignored.

    A hangup of a peer is then an error code and does not end the process.
    """
    os.setpgid(0, 0)
    _signal.pthread_sigmask(_signal.SIG_BLOCK, _EVERY_SIGNAL)
    reset_signals(_signal.SIGPIPE)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())


def reset_signals(*ignored: int) -> None:
    """Reset all signal handlers, and ignore the named signals.

    The caller must be the only thread and block all signals, because the interpreter reports an
    error for a signal caught meanwhile (:mod:`shim.handlers`).
    """
    signal.set_wakeup_fd(-1)
    for number in _EVERY_SIGNAL:
        action = _signal.SIG_IGN if number in ignored else _signal.SIG_DFL
        # Query first: setting a correct handler again would write to shared memory.
        if _signal.getsignal(number) != action:
            _signal.signal(number, action)


def close_others(kept: set[int]) -> None:
    """Close all descriptors except some."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                pass  # the descriptor that listed them


async def read_report(fd: int, *, timeout: float) -> tuple[bytes, bool]:
    """Read the report of a forked process or thread, up to the end of the pipe.

    Args:
        fd: the pipe's read end, which does not block.
        timeout: the time limit in seconds.

    Returns:
        The received part of the report, and whether it was complete in time.
    """
    report = bytearray()
    with loop.move_on_after(timeout) as waiting:
        while len(report) < _LONGEST_REPORT:
            try:
                chunk = os.read(fd, _LONGEST_REPORT)
            except BlockingIOError:
                await loop.wait_readable(fd)
                continue
            if not chunk:
                break
            report += chunk
    return bytes(report), not waiting.cancelled_caught


def fail(report: int, doing: str, error: BaseException) -> NoReturn:
    """Report a failure, and exit.

    Args:
        report: the pipe.
        doing: the failed action.
        error: the error.
    """
    try:
        os.write(report, FAILED + one_line(f"{doing}: {reason(error)}").encode())
    finally:
        os._exit(1)


def reason(error: BaseException) -> str:
    """Return the reason for a failure, from the kernel if available."""
    if not isinstance(error, OSError):
        return str(error)
    return os.strerror(error.errno).lower() if error.errno else str(error.strerror)
