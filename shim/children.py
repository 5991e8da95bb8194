"""The shim's children: starts programs, and is the only caller of wait(2).

Starting
- Programs start from the main thread, because runc's parent-death signal is tied to a thread, and
  this one lives as long as the shim. They get descriptors 0, 1 and 2, those that the caller adds,
  and no others: a leaked directory descriptor was the root of CVE-2024-21626.
- The C function below :mod:`subprocess` renumbers only the first three descriptors. So 3, 4 and 5
  stay unused in the shim (:func:`reserve_numbers`): a program that needs them inherits those in
  place during its start.
- That function uses vfork(2). Its module would add a second caller of wait(2), and
  ``os.posix_spawn`` (glibc, in its child) leaves signals 32 and 33 ignored, which containers would
  inherit.
- Like containerd's own shim, this one may open as many files as its hard limit allows: each running
  exec needs seven, and systemd's limit for a service is 1024. Programs get the soft limit from the
  shim's start, which containers without their own limit inherit.

Waiting
- The shim is a subreaper: besides the runtimes that it spawns, every container's init process and
  exec becomes its child when runc exits. The first call of ``waitpid`` consumes the status, so
  there is one caller, which distributes them.
- Nothing else in this process waits, not even :mod:`subprocess` or the process functions of asyncio
  and anyio. (They report status 0 or 255 if another caller has reaped the child.)
- A spawned process is registered before the loop runs again, so its exit cannot be missed. The pid
  of a container's process comes later, from runc's pid file, perhaps after its exit. While a
  :meth:`Reaper.window` is open, the exits of unknown pids are kept.
- No timer is involved: a loaded machine delays exits, but never loses one.
- A container can create any number of children of ours: an exec with clone(2) and CLONE_PARENT; in
  the node's pid namespace, all its orphans are. So requests get their turn even if such processes
  end without pause, and a window keeps only the newest exits.

Source: vfork(2); prctl(2) PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER; waitid(2);
glibc sysdeps/unix/sysv/linux/spawni.c.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import time
from _posixsubprocess import fork_exec
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from api.values import dataclass
from shim import loop, programs
from shim.errors import ProgramNotFound, ProgramTimeout

_LONGEST_FAILURE: Final = 256

# Children to reap before other work gets a turn: the more there are, the longer each takes.
_MOST_AT_ONCE: Final = 64

# The most exits of unknown processes to keep; a runtime takes milliseconds to name its own.
_MOST_UNCLAIMED: Final = 1 << 14

_CHUNK: Final = 65536

_FURTHER: Final = (3, 4, 5)
_reserved: list[int] = []

# The soft limit of open files for programs; empty for the shim's own.
_files_of_programs: list[int] = []


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended."""

    pid: int  # which process
    status: int  # its exit code (0-255), or 128 + the signal that killed it
    at: int  # the time of reaping, in nanoseconds since the epoch


class Child:
    """A process whose exit this shim waits for."""

    __slots__ = ("_done", "exit", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exit: Exit | None = None
        self._done = loop.Event()

    def runs(self) -> bool:
        """Whether the process still runs; an unreaped zombie does not."""
        if self.exit is not None:
            return False
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def signal(self, number: int) -> None:
        """Signal the process unless it was reaped: another process may have its pid by now."""
        if self.exit is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, unless it was reaped."""
        self.signal(signal.SIGKILL)

    async def wait(self) -> Exit:
        """Wait for the process's end, and return how it ended."""
        await self._done.wait()
        if self.exit is None:
            message = "the exit of a child is known before its waiters are woken"
            raise AssertionError(message)
        return self.exit

    def _finish(self, exit_: Exit) -> None:
        self.exit = exit_
        self._done.set()


class Reaper:
    """Reaps ended children, and wakes the tasks that wait for them."""

    def __init__(self) -> None:
        self._children: dict[int, Child] = {}
        self._windows = 0
        self._unclaimed: OrderedDict[int, Exit] = OrderedDict()

    @contextmanager
    def window(self) -> Iterator[None]:
        """Keep the exits of unknown processes, for a pid that becomes known later."""
        self._windows += 1
        try:
            yield
        finally:
            self._windows -= 1
            if not self._windows:
                self._unclaimed.clear()

    def register(self, pid: int) -> Child:
        """Keep the exit of a process from now on.

        Args:
            pid: a child spawned in this turn of the loop, or left to us by a runtime in an open
                :meth:`window`.

        Returns:
            The child, with its exit if it has already ended.

        Raises:
            ChildProcessError: it never was our child.
        """
        child = Child(pid)
        kept = self._unclaimed.pop(pid, None)
        if not _is_our_child(pid):
            if kept is None:
                message = f"process {pid} is not a child of the shim"
                raise ChildProcessError(message)
            child._finish(kept)  # noqa: SLF001 - a Child is finished by its reaper alone
        else:
            self._children[pid] = child
        return child

    def reap(self) -> None:
        """Reap ended children. Call this on SIGCHLD, which comes again for more."""
        for _ in range(_MOST_AT_ONCE):
            try:
                result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                return
            if result is None:
                return
            status = result.si_status
            if result.si_code != os.CLD_EXITED:
                status += 128
            exit_ = Exit(result.si_pid, status, time.time_ns())
            child = self._children.pop(exit_.pid, None)
            if child is not None:
                child._finish(exit_)  # noqa: SLF001 - see register
            elif self._windows:
                self._keep(exit_)
        signal.raise_signal(signal.SIGCHLD)

    def _keep(self, exit_: Exit) -> None:
        self._unclaimed[exit_.pid] = exit_
        self._unclaimed.move_to_end(exit_.pid)
        if len(self._unclaimed) > _MOST_UNCLAIMED:
            self._unclaimed.popitem(last=False)


def _is_our_child(pid: int) -> bool:
    """Whether a live child has this pid now: a kept exit is then its predecessor's."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:  # not our child, or not a valid pid
        return False
    return True


def reserve_numbers(listener: int) -> int:
    """Reserve the descriptor numbers that programs get besides 0 to 2.

    Call this before anything else is opened.

    Args:
        listener: the only open descriptor besides the first three.

    Returns:
        Its new number.
    """
    moved = fcntl.fcntl(listener, fcntl.F_DUPFD_CLOEXEC, _FURTHER[-1] + 1)
    os.close(listener)
    for number in _FURTHER:
        os.dup2(0, number, inheritable=False)
    _reserved[:] = _FURTHER
    return moved


def raise_file_limit() -> None:
    """Raise this process' limit of open files, but not that of its programs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return  # it exceeds the kernel's current maximum
    _files_of_programs[:] = [soft]


@contextmanager
def _file_limit_of_programs() -> Iterator[None]:
    if not _files_of_programs:
        yield
        return
    ours = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(*_files_of_programs, *ours), ours[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, ours)


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
        reaper: waits for the program.
        argv: the program (a name looked up in PATH, or a path) and its arguments.
        fds: our descriptors for its 0, 1 and 2 (default /dev/null) and its 3, 4 and 5 (after
            :func:`reserve_numbers`). It gets no others.
        program: the path of the executable, if it differs from that in ``argv``.
        environment: more variables for the program.

    Returns:
        The running child.

    Raises:
        ProgramNotFound: there is no such program.
        OSError: no descriptor is free, or the process limit is reached.
    """
    program = program or programs.find(argv[0])
    if program is None:
        raise ProgramNotFound(
            f"to run {argv[0]!r}",
            found=f"no such program in {programs.search_path()}",
            do="install it, or name another with BinaryName in the runtime's options",
        )
    source = sink = reading = writing = -1
    try:
        source = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        sink = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        # Through this pipe, the child reports why exec failed; a successful exec closes it.
        reading, writing = os.pipe2(os.O_CLOEXEC)
        variables = {**programs.fixed_environment(), **(environment or {})}
        standard = [fds.get(0, source), fds.get(1, sink), fds.get(2, sink)]
        further_fds = {n: fd for n, fd in fds.items() if n > 2}  # noqa: PLR2004 - stderr
        with _in_place(further_fds) as further, _file_limit_of_programs():
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
        for fd in (source, sink, reading, writing):
            if fd >= 0:
                os.close(fd)
    child = reaper.register(pid)
    if failure:
        # "OSError:ERRNO in hexadecimal:", written by the C function
        number = int(failure.split(b":")[1] or b"0", 16)
        raise ProgramNotFound(
            f"to run {program!r}",
            found=os.strerror(number),
            do="check that it is an executable of this machine's architecture",
        )
    return child


@contextmanager
def _in_place(fds: Mapping[int, int]) -> Iterator[list[int]]:
    """Put descriptors in place for a child, and yield their numbers."""
    if not set(fds) <= set(_reserved):
        message = "numbers are reserved before a child gets them"
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
        True,  # reset SIGPIPE and SIGXFSZ, which the interpreter ignores
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
    """The result of a program: how it ended, and its stdout."""

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
    """Run a program to its end and read its stdout.

    Args:
        reaper: waits for the program.
        argv: the program and its arguments.
        fds: other descriptors for the program; we read its stdout.
        timeout: seconds after which it is killed; None for no limit.
        limit: the most bytes of its output to keep; the rest is read and dropped.

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
        # Out of time, or cancelled. The pid is still its own: only our reaper frees it.
        if child is not None and child.exit is None:
            os.kill(child.pid, signal.SIGKILL)


async def _read_when_ready(fd: int) -> bytes:
    while True:
        try:
            return os.read(fd, _CHUNK)
        except BlockingIOError:
            await loop.wait_readable(fd)
