"""Programs: find them by name, set their environment, and run one with a time limit.

The verbs and the server find the low-level runtime in the same way. Nothing here comes from an
image: PATH is containerd's own. The server starts programs with :mod:`shim.children`; a verb has
nothing else to do, so it waits (:func:`run`).

Source: posix_spawn(3), memfd_create(2), pidfd_open(2).
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence
from typing import Final, NamedTuple

_DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Also needed by a runtime: the user's bus, for rootless systemd cgroups.
_PASSED_ON: Final = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")

# Seconds.
_REAP_TIMEOUT: Final = 0.2


def search_path() -> str:
    """Return the search path of programs: containerd's PATH, or the usual directories."""
    return os.environ.get("PATH") or _DEFAULT_PATH


def fixed_environment() -> dict[str, str]:
    """Return the environment of every program that the shim starts.

    Returns:
        containerd's PATH, LANG, and the variables in ``_PASSED_ON`` that are set.
    """
    environment = {"PATH": search_path(), "LANG": "C.UTF-8"}
    environment.update({name: os.environ[name] for name in _PASSED_ON if name in os.environ})
    return environment


def find(name: str) -> str | None:
    """Return the path of a program.

    Args:
        name: a name to look up in :func:`search_path`, or a path.

    Returns:
        Its path; None if it is not an executable.
    """
    candidates = (
        [name] if "/" in name else [os.path.join(d or ".", name) for d in search_path().split(":")]
    )
    for candidate in candidates:
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return os.path.abspath(candidate)
    return None


class Ended(NamedTuple):
    """How a program ended, and its output."""

    # its exit code, or the negative number of a signal; None if it was killed after the timeout
    status: int | None
    stdout: bytes  # the start of its output
    stderr: bytes  # the start of its stderr; of both if they share a pipe


def run(program: str, words: Sequence[str], *, timeout: float, longest: int = 4096) -> Ended:
    """Run a program with nothing on its stdin.

    Args:
        program: the program's path.
        words: the arguments, starting with the program's name.
        timeout: seconds after which it is killed, together with all processes in its group.
        longest: the maximum number of bytes to keep of each output.

    Raises:
        OSError: the program cannot be executed.
    """
    # Use files in memory, since a daemon that the program leaves behind could hold a pipe open.
    stdout = os.memfd_create("stdout", os.MFD_CLOEXEC)
    stderr = os.memfd_create("stderr", os.MFD_CLOEXEC)
    try:
        pid = os.posix_spawn(
            program,
            list(words),
            fixed_environment(),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, stdout, 1),
                (os.POSIX_SPAWN_DUP2, stderr, 2),
            ],
            setpgroup=0,  # to end its children with it
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),
        )
        status = _wait(pid, timeout)
        return Ended(status, os.pread(stdout, longest, 0), os.pread(stderr, longest, 0))
    finally:
        os.close(stdout)
        os.close(stderr)


def has_ended(pidfd: int, timeout: float) -> bool:
    """Wait some seconds for a process; return whether it has ended.

    Args:
        pidfd: the process.
        timeout: the time limit in seconds.
    """
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def _wait(pid: int, timeout: float) -> int | None:
    """Wait for our child; return its exit status, or None if it was killed for the timeout."""
    pidfd = os.pidfd_open(pid)
    try:
        if not has_ended(pidfd, timeout):
            os.killpg(pid, signal.SIGKILL)
            # A process that hangs in the kernel survives even this: init will reap it.
            if has_ended(pidfd, _REAP_TIMEOUT):
                os.waitpid(pid, 0)
            return None
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(pidfd)
