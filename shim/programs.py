"""Programs: which one a name means, its environment, and running one to its end in a bounded time.

The verbs and the server start the same low-level runtime, so they find it alike. Nothing here
can come from an image: PATH is containerd's own. What the server starts it starts by
:mod:`shim.children`; a verb has nothing else to do meanwhile, and waits (:func:`run`).

Source: posix_spawn(3), memfd_create(2), pidfd_open(2).
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence
from typing import Final, NamedTuple

_DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# What a runtime needs besides: the user's bus, for rootless systemd cgroups.
_PASSED_ON: Final = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")

# Seconds.
_REAP_TIMEOUT: Final = 0.2


def search_path() -> str:
    """Where programs are looked up: containerd's PATH, or the usual directories."""
    return os.environ.get("PATH") or _DEFAULT_PATH


def fixed_environment() -> dict[str, str]:
    """The environment of every program that the shim starts.

    Returns:
        PATH as containerd has it, LANG, and the few variables of ``_PASSED_ON`` if set.
    """
    environment = {"PATH": search_path(), "LANG": "C.UTF-8"}
    environment.update({name: os.environ[name] for name in _PASSED_ON if name in os.environ})
    return environment


def find(name: str) -> str | None:
    """The path of a program.

    Args:
        name: a name to look up in :func:`search_path`, or a path.

    Returns:
        Its path; None if there is none that may be executed.
    """
    candidates = (
        [name] if "/" in name else [os.path.join(d or ".", name) for d in search_path().split(":")]
    )
    for candidate in candidates:
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return os.path.abspath(candidate)
    return None


class Ended(NamedTuple):
    """How a program ended, and what it wrote."""

    # its exit code, or the signal's number below zero; None if it had to be killed because its time
    # was up
    status: int | None
    stdout: bytes  # the start of its output
    stderr: bytes  # the start of its errors; both if they share one pipe


def run(program: str, words: Sequence[str], *, timeout: float, longest: int = 4096) -> Ended:
    """Run a program with nothing on its stdin.

    Args:
        program: its path.
        words: its arguments, its name first.
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
            fixed_environment(),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, stdout, 1),
                (os.POSIX_SPAWN_DUP2, stderr, 2),
            ],
            setpgroup=0,  # so that what it starts can be ended with it
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGXFSZ),
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
            os.killpg(pid, signal.SIGKILL)
            # One that hangs in the kernel does not die even of that: init will reap it.
            if has_ended(pidfd, _REAP_TIMEOUT):
                os.waitpid(pid, 0)
            return None
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(pidfd)
