"""Starting programs: exactly the descriptors meant for them, and a fixed environment.

``posix_spawn`` (vfork underneath) runs on the main thread, so that a parent-death signal set
by runc is tied to a thread that lives as long as the shim. All our descriptors are
close-on-exec (PEP 446), so a child has those named in ``fds`` and no other: a leaked
directory descriptor is how CVE-2024-21626 began.

Source: posix_spawn(3); prctl(2) PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import fcntl
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio

from shim import programs
from shim.errors import ProgramNotFound, ProgramTimeout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shim.reaper import Child, Exit, Reaper

# The interpreter ignores these; what we start must not inherit that.
_RESET_SIGNALS: Final = (signal.SIGPIPE, signal.SIGXFSZ)

_CHUNK: Final = 65536


def spawn(reaper: Reaper, argv: Sequence[str], *, fds: Mapping[int, int]) -> Child:
    """Start a program.

    Args:
        reaper: who waits for it.
        argv: the program (a name looked up in PATH, or a path) and its arguments.
        fds: which of our descriptors the program has, by the number it has there. 0, 1 and
            2 are /dev/null where they are not named.

    Returns:
        The running child.

    Raises:
        ProgramNotFound: there is no such program.
    """
    program = programs.find(argv[0])
    if program is None:
        raise ProgramNotFound(
            f"to run {argv[0]!r}",
            found=f"no such program in {programs.search_path()}",
            do="install it, or name another with BinaryName in the runtime's options",
        )
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    borrowed = [null]
    try:
        wanted = {0: null, 1: null, 2: null, **fds}
        # dup2 runs in order: a source that is also a target has to be moved out of the way.
        above = max(wanted) + 1
        actions = []
        for number, fd in wanted.items():
            source = fd
            if fd in wanted:
                source = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above)
                borrowed.append(source)
            actions.append((os.POSIX_SPAWN_DUP2, source, number))
        try:
            pid = os.posix_spawn(
                program,
                list(argv),
                programs.fixed_environment(),
                file_actions=actions,
                setsigmask=(),
                setsigdef=_RESET_SIGNALS,
            )
        except OSError as error:
            raise ProgramNotFound(
                f"to run {program!r}",
                found=os.strerror(error.errno or 0),
                do="check that it is an executable of this machine's architecture",
            ) from error
    finally:
        for fd in borrowed:
            os.close(fd)
    return reaper.register(pid)


@dataclass(frozen=True, slots=True)
class Completed:
    """What a program left: how it ended, and what it wrote to stdout."""

    exit: Exit
    output: bytes


async def run(
    reaper: Reaper,
    argv: Sequence[str],
    *,
    fds: Mapping[int, int] | None = None,
    timeout: float | None = None,
    limit: int = 1 << 20,
) -> Completed:
    """Run a program to its end and read what it prints on stdout.

    Args:
        reaper: who waits for it.
        argv: the program and its arguments.
        fds: further descriptors for it; stdout is ours.
        timeout: seconds after which it is killed; without it, it may take its time.
        limit: how many bytes of its output are kept; the rest is read and dropped.

    Returns:
        Its exit and output.

    Raises:
        ProgramNotFound: there is no such program.
        ProgramTimeout: it did not end in time, and was killed.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    child: Child | None = None
    output = bytearray()
    try:
        try:
            fcntl.fcntl(writing, fcntl.F_SETFL, 0)
            child = spawn(reaper, argv, fds={**(fds or {}), 1: writing})
        finally:
            os.close(writing)
        with anyio.fail_after(timeout):
            while chunk := await _read_when_ready(reading):
                output += chunk[: limit - len(output)]
            return Completed(await child.wait(), bytes(output))
    except TimeoutError:
        raise ProgramTimeout(
            f"to run {argv[0]!r}",
            found=f"it had not ended after {timeout} s",
            do="look for what holds it up (a hung driver, a frozen cgroup) in the kernel's log",
        ) from None
    finally:
        os.close(reading)
        # Out of time, or nobody wants the answer any more. The pid can't be another
        # process's by now: only our reaper frees it.
        if child is not None and child.exit is None:
            os.kill(child.pid, signal.SIGKILL)


async def _read_when_ready(fd: int) -> bytes:
    while True:
        try:
            return os.read(fd, _CHUNK)
        except BlockingIOError:
            await anyio.wait_readable(fd)
