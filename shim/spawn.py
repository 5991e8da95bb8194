"""Starting programs: exactly the descriptors meant for them, and a fixed environment.

A program is started from the main thread, so that a parent-death signal set by runc is tied to
a thread that lives as long as the shim. It has descriptors 0, 1 and 2 and no other: a leaked
directory descriptor is how CVE-2024-21626 began.

The C function under :mod:`subprocess` does it with vfork(2). Its module would bring a second
owner of wait(2); and ``os.posix_spawn`` leaves signals 32 and 33 ignored (glibc does, in its
child), which containers would inherit.

Source: vfork(2); prctl(2) PR_SET_PDEATHSIG; glibc sysdeps/unix/sysv/linux/spawni.c.
"""

from __future__ import annotations

import fcntl
import os
import signal
from _posixsubprocess import fork_exec
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio

from shim import programs
from shim.errors import ProgramNotFound, ProgramTimeout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shim.reaper import Child, Exit, Reaper

_LONGEST_FAILURE: Final = 256
_CHUNK: Final = 65536


def spawn(
    reaper: Reaper,
    argv: Sequence[str],
    *,
    fds: Mapping[int, int],
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Start a program.

    Args:
        reaper: who waits for it.
        argv: the program (a name looked up in PATH, or a path) and its arguments.
        fds: which of our descriptors are its 0, 1 and 2; those not named are /dev/null. It has
            no others.
        environment: further variables for it.

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
    # The child reports over this pipe why it could not execute; exec itself closes it.
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        pid = _fork_exec(
            program,
            argv,
            [fds.get(n, null) for n in (0, 1, 2)],
            (reading, writing),
            {**programs.fixed_environment(), **(environment or {})},
        )
        os.close(writing)
        writing = -1
        failure = os.read(reading, _LONGEST_FAILURE)
    finally:
        for fd in (null, reading, writing):
            if fd >= 0:
                os.close(fd)
    child = reaper.register(pid)
    if failure:
        # "OSError:ERRNO in hexadecimal:", as the C function writes it
        number = int(failure.split(b":")[1] or b"0", 16)
        raise ProgramNotFound(
            f"to run {program!r}",
            found=os.strerror(number),
            do="check that it is an executable of this machine's architecture",
        )
    return child


def _fork_exec(
    program: str,
    argv: Sequence[str],
    standard: list[int],
    report: tuple[int, int],
    environment: Mapping[str, str],
) -> int:
    return fork_exec(
        [os.fsencode(word) for word in argv],
        [os.fsencode(program)],
        True,  # close all other descriptors
        (report[1],),
        None,  # type: ignore[arg-type]  # typeshed: the directory may well be None
        [os.fsencode(f"{k}={v}") for k, v in environment.items()],
        standard[0], -1,
        -1, standard[1],
        -1, standard[2],
        *report,
        True,  # SIGPIPE and SIGXFSZ, which the interpreter ignores, back to default
        False,
        -1,
        None,
        None,
        None,
        -1,
        None,  # type: ignore[arg-type]  # so may the function to call
        True,  # vfork
    )  # fmt: skip


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
