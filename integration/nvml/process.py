"""Start, watch and kill a child that opens NVML.

A child is executed by its path, with no environment, in its own session, and inherits the lock of
NVML (:mod:`integration.nvml.lock`) until it exits. For programs that start many children,
:func:`fork_server` makes them forks of a process that has already imported pynvml
(:mod:`integration.nvml.fork_server`): starting Python with pynvml takes 30 ms of CPU time, a fork 3
ms.

Rules
- Nothing polls. If a child was started directly, the agent waits for its pidfd; if it was forked,
  for the pipe on which the fork server writes its exit status.
- The fork server is started with the first child, and again if it has exited. If it cannot be
  started, no child can be started.
- A forked child is a child of the fork server, which alone reaps it, and it exits with the server.
- A child that is stuck in the kernel survives SIGKILL. After :data:`TO_DIE` seconds it is
  abandoned.

Source: pidfd_open(2); unix(7), SCM_RIGHTS.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Final

from hooks.node.nvml import modules_directory
from integration.nvml import child as child_program
from integration.nvml import fork_server as server_program
from integration.nvml.lock import NONE, shared
from integration.timeouts import PATIENCE

__all__ = ["TO_DIE", "NvmlClosed", "Process", "Stop", "child_command", "fork_server", "start"]

TO_DIE: Final = 1.0
"""Seconds that a killed child has to end before it is left alone."""

# Seconds for the fork server to start and fork, and to end.
_TO_FORK: Final = 5.0 * PATIENCE
_TO_END: Final = 1.0
_LONGEST: Final = 16


class NvmlClosed(Exception):
    """A GPU is being reset, or its MIG mode switched: no child may open NVML."""


class Stop:
    """A flag that a wait for a child can watch."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.is_set = False

    def __del__(self) -> None:
        os.close(self._fd)

    def fileno(self) -> int:
        """Return a descriptor that is readable once the flag is set."""
        return self._fd

    def set(self) -> None:
        """Wake all waits."""
        self.is_set = True
        os.eventfd_write(self._fd, 1)


def child_command(
    task: str, library: str, *arguments: str, seconds: float = 0, ends_with_us: bool = False
) -> list[str]:
    """Return the command line of a child (:mod:`integration.nvml.child`).

    Args:
        task: the child's task: :data:`.child.QUERY`, :data:`.child.EVENTS` or
            :data:`.child.SAMPLES`.
        library: the path of NVML's library.
        arguments: the arguments of the task.
        seconds: the time after which the kernel ends the child; 0 for no limit.
        ends_with_us: whether it exits with the calling *thread* (prctl(2), PR_SET_PDEATHSIG).

    Raises:
        OSError: the fork server cannot be started.
    """
    server = _SERVER.get()
    parent = 0
    if ends_with_us:
        parent = os.getpid() if server is None else server.start()
    words = (task, f"{seconds:g}", str(parent), library, modules_directory(), *arguments)
    return [sys.executable, "-I", "-S", child_program.__file__, *words]


def start(
    command: Sequence[str], *, stdin: int, stdout: int, state: str, patience: float
) -> Process:
    """Start a child that opens NVML, with the lock of NVML.

    Args:
        command: the interpreter, its options -I and -S, the program's path, and its arguments.
        stdin: a descriptor, or ``subprocess.DEVNULL``.
        stdout: a descriptor.
        state: the directory ``state`` of the configuration.
        patience: the seconds to wait for a process that needs NVML closed.

    Raises:
        NvmlClosed: NVML has to stay closed for longer than that.
        OSError: the child cannot be started.
    """
    with shared(state, patience) as lock:
        if lock is None:
            raise NvmlClosed
        if (server := _SERVER.get()) is not None:
            return server.fork(command, stdin, stdout, lock)
        process = subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, env={}, cwd="/",
            start_new_session=True, pass_fds=() if lock == NONE else (lock,),
        )  # fmt: skip
        return _started(process)


class Process:
    """A child.

    Args:
        pid: its process id.
        end: a descriptor that becomes readable once the child has exited; this object owns it.
        status: returns the exit status; None while the child runs.
        kill: sends SIGKILL.
    """

    def __init__(
        self, pid: int, end: int, status: Callable[[], int | None], kill: Callable[[], None]
    ) -> None:
        self.pid: Final = pid
        self._end = os.fdopen(end, "rb", buffering=0)
        self._read, self._kill = status, kill
        self._status: int | None = None

    def fileno(self) -> int:
        """Return a descriptor that is readable once the child has ended."""
        return self._end.fileno()

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the child runs."""
        if self._status is None and (status := self._read()) is not None:
            self._status = status
            self._end.close()
        return self._status

    def wait(self, seconds: float, stop: Stop | None = None) -> bool:
        """Wait until the child has exited; return whether it has.

        Args:
            seconds: the time limit.
            stop: ends the wait early.
        """
        if self.poll() is None:
            poll = select.poll()
            poll.register(self, select.POLLIN)
            if stop is not None:
                poll.register(stop, select.POLLIN)
            poll.poll(seconds * 1000)
        return self.poll() is not None

    def kill(self) -> None:
        """Send SIGKILL, unless the child has ended."""
        if self.poll() is None:
            self._kill()


def _started(process: subprocess.Popen[bytes]) -> Process:
    """Make a child of this process a :class:`Process`."""
    return Process(process.pid, os.pidfd_open(process.pid), process.poll, process.kill)


def _status_from(pipe: int) -> int | None:
    """Read what the fork server writes when a child has ended; None if nothing is there yet."""
    try:
        # Without a status the server has ended, and its children with it.
        return int(os.read(pipe, _LONGEST) or -signal.SIGKILL)
    except BlockingIOError:
        return None


@contextmanager
def fork_server() -> Iterator[None]:
    """Fork children from a server, in this context and in contexts copied from it."""
    server = _Server()
    token = _SERVER.set(server)
    try:
        yield
    finally:
        _SERVER.reset(token)
        server.stop()


class _Server:
    """The fork server's client, for several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def start(self) -> int:
        """Start the server unless it runs; return its process id.

        Raises:
            OSError: the server cannot be started.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._socket.close()
                self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with its:
                    self._process = subprocess.Popen(
                        [sys.executable, "-I", "-S", server_program.__file__, modules_directory()],
                        stdin=its.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                        env={}, cwd="/", start_new_session=True,
                    )  # fmt: skip
            return self._process.pid

    def fork(self, command: Sequence[str], stdin: int, stdout: int, lock: int) -> Process:
        """Fork a child.

        Raises:
            OSError: the server cannot be started, does not know the program, or cannot fork.
        """
        _, _, _, program, *arguments = command
        request = json.dumps({"program": program, "arguments": arguments}).encode()
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        descriptors = [nothing if stdin == subprocess.DEVNULL else stdin, stdout, writing]
        try:
            with self._lock:
                self.start()
                self._socket.settimeout(_TO_FORK)
                lock_too = [] if lock == NONE else [lock]
                socket.send_fds(self._socket, [request], descriptors + lock_too)
                answer = self._socket.recv(_LONGEST)
                if not answer:
                    raise BrokenPipeError("the fork server has ended")
        except OSError:
            os.close(reading)
            self.stop()
            raise
        finally:
            os.close(nothing)
            os.close(writing)
        if (pid := int(answer)) < 0:
            os.close(reading)
            raise OSError(-pid, os.strerror(-pid), program)
        return Process(pid, reading, partial(_status_from, reading), partial(self._kill, pid))

    def _kill(self, pid: int) -> None:
        """Kill a child that the server has not reaped yet."""
        with self._lock, suppress(OSError):  # without a server, it has ended
            self._socket.send(json.dumps({"kill": pid}).encode())

    def stop(self) -> None:
        """End the server, and with it the children that it has forked."""
        with self._lock:
            self._socket.close()
            if self._process is not None:
                try:
                    self._process.wait(_TO_END)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
            self._process = None


_SERVER: Final[ContextVar[_Server | None]] = ContextVar("_SERVER", default=None)
