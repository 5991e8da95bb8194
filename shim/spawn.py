"""Starting programs: exactly the descriptors meant for them, and a fixed environment.

A program is started from the main thread, so that a parent-death signal set by runc is tied to
a thread that lives as long as the shim. It has descriptors 0, 1 and 2, those that it is given
besides, and no other: a leaked directory descriptor is how CVE-2024-21626 began.

The C function under :mod:`subprocess` renumbers no descriptor but the first three. So 3, 4 and 5
are nobody's in the shim (:func:`reserve_numbers`): a program that is to have them inherits what
lies there while it is started.

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
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from api.values import dataclass
from shim import loop, programs
from shim.errors import ProgramNotFound, ProgramTimeout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shim.reaper import Child, Exit, Reaper

_LONGEST_FAILURE: Final = 256
_CHUNK: Final = 65536

_FURTHER: Final = (3, 4, 5)
_reserved: list[int] = []


def reserve_numbers(listener: int) -> int:
    """Let nothing of this process have the numbers that programs may be given besides 0 to 2.

    To be called before anything else is opened.

    Args:
        listener: the one descriptor that is open already, apart from the first three.

    Returns:
        Its new number.
    """
    moved = fcntl.fcntl(listener, fcntl.F_DUPFD_CLOEXEC, _FURTHER[-1] + 1)
    os.close(listener)
    for number in _FURTHER:
        os.dup2(0, number, inheritable=False)
    _reserved[:] = _FURTHER
    return moved


def spawn(
    reaper: Reaper,
    argv: Sequence[str],
    *,
    fds: Mapping[int, int],
    program: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Start a program.

    Args:
        reaper: who waits for it.
        argv: the program (a name looked up in PATH, or a path) and its arguments.
        fds: which of our descriptors are its 0, 1 and 2, where those not named are /dev/null,
            and its 3, 4 and 5 (after :func:`reserve_numbers`). It has no others.
        program: the path of what is executed, where that is not what ``argv`` says.
        environment: further variables for it.

    Returns:
        The running child.

    Raises:
        ProgramNotFound: there is no such program.
        OSError: no descriptor or no process is to be had.
    """
    program = program or programs.find(argv[0])
    if program is None:
        raise ProgramNotFound(
            f"to run {argv[0]!r}",
            found=f"no such program in {programs.search_path()}",
            do="install it, or name another with BinaryName in the runtime's options",
        )
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    reading = writing = -1
    try:
        # The child reports over this pipe why it could not execute; exec itself closes it.
        reading, writing = os.pipe2(os.O_CLOEXEC)
        variables = {**programs.fixed_environment(), **(environment or {})}
        standard = [fds.get(n, null) for n in (0, 1, 2)]
        with _in_place({n: fd for n, fd in fds.items() if n > 2}) as further:  # noqa: PLR2004 - stderr
            pid = _fork_exec(
                program,
                argv,
                variables,
                standard=standard,
                further=further,
                report=(reading, writing),
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


@contextmanager
def _in_place(fds: Mapping[int, int]) -> Iterator[list[int]]:
    """Put descriptors where a child is to find them; yields where that is."""
    if not set(fds) <= set(_reserved):
        message = "numbers are reserved before a child is given them"
        raise AssertionError(message)
    try:
        for number, fd in fds.items():
            os.dup2(fd, number, inheritable=False)
        yield sorted(fds)
    finally:
        for number in fds:
            os.dup2(0, number, inheritable=False)


def _fork_exec(
    program: str,
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    standard: list[int],
    further: list[int],
    report: tuple[int, int],
) -> int:
    return fork_exec(
        [os.fsencode(word) for word in argv],
        [os.fsencode(program)],
        True,  # close all other descriptors
        (*further, report[1]),  # in ascending order
        None,  # type: ignore[arg-type]  # typeshed: the directory may well be None
        [os.fsencode(f"{name}={value}") for name, value in environment.items()],
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
        with loop.fail_after(timeout):
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
            await loop.wait_readable(fd)
