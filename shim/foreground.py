"""A program that a verb runs to its end, in a bounded time.

The server has :mod:`shim.spawn` and its reaper for that; a verb has nothing else to do
meanwhile, and nothing but the standard library's cheapest modules.

Source: posix_spawn(3), memfd_create(2), pidfd_open(2).
"""

from __future__ import annotations

import os
import select

from shim import programs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

# The C module under signal: the public one imports enum, which costs 6 ms.
if TYPE_CHECKING:
    import signal as _signal
else:
    import _signal

_REAP_TIMEOUT: Final = 0.2


class Ended:
    """How a program ended, and what it wrote.

    Attributes:
        status: its exit code, or the signal's number below zero; None if it had to be killed
            because its time was up.
        stdout: the beginning of what it wrote there.
        stderr: the same; all of it is there if both were one.
    """

    __slots__ = ("status", "stderr", "stdout")

    def __init__(self, status: int | None, stdout: bytes, stderr: bytes) -> None:
        self.status = status
        self.stdout = stdout
        self.stderr = stderr


def run(program: str, words: Sequence[str], *, timeout: float, longest: int = 4096) -> Ended:
    """Run a program with nothing on its stdin.

    Args:
        program: its path.
        words: its arguments, beginning with its name.
        timeout: seconds after which it is killed, with all that it started in its group.
        longest: how many bytes of either output are kept.

    Raises:
        OSError: it cannot be executed.
    """
    # Files in memory, since a pipe could be held open by whatever the program leaves behind.
    stdout = os.memfd_create("stdout", os.MFD_CLOEXEC)
    stderr = os.memfd_create("stderr", os.MFD_CLOEXEC)
    try:
        pid = os.posix_spawn(
            program,
            list(words),
            programs.fixed_environment(),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, stdout, 1),
                (os.POSIX_SPAWN_DUP2, stderr, 2),
            ],
            setpgroup=0,  # so that what it starts can be ended with it
            setsigmask=(),
            setsigdef=(_signal.SIGPIPE, _signal.SIGXFSZ),
        )
        status = _wait(pid, timeout)
        return Ended(status, os.pread(stdout, longest, 0), os.pread(stderr, longest, 0))
    finally:
        os.close(stdout)
        os.close(stderr)


def has_ended(pidfd: int, timeout: float) -> bool:
    """Whether a process has ended, waiting for it for some seconds.

    Args:
        pidfd: the process.
        timeout: seconds.
    """
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def _wait(pid: int, timeout: float) -> int | None:
    """Wait for our child; returns its exit status, or None if it had to be killed."""
    pidfd = os.pidfd_open(pid)
    try:
        if not has_ended(pidfd, timeout):
            os.killpg(pid, _signal.SIGKILL)
            # One that hangs in the kernel does not die even of that: init will reap it.
            if has_ended(pidfd, _REAP_TIMEOUT):
                os.waitpid(pid, 0)
            return None
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(pidfd)
