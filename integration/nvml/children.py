"""Starting programs that open NVML, which no process of ours that lives on does itself.

Such a program is run by path, has no environment, and inherits the lock of NVML
(:mod:`integration.nvml.lock`). Where many are started, as in the agent, a server forks them
(:mod:`integration.nvml.server`): a process with pynvml costs 30 ms of a processor, a fork of one
that has imported it 3 ms.

Rules
- The server begins with the first program, and ends with :func:`forking`. If it has ended before,
  another one is begun; a program that it cannot be had for is one that cannot be started.
- What was forked is the server's child, which alone reaps it, and ends with the server.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Protocol

from hooks.node.nvml import modules_directory
from integration.nvml import server as server_program
from integration.nvml.lock import NONE
from integration.timeouts import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Process", "forking", "parent", "start"]

# Seconds for the server to begin and fork, and to end.
_TO_FORK: Final = 5.0 * PATIENCE
_TO_END: Final = 1.0
_LONGEST: Final = 16


class Process(Protocol):
    """What was started: of :class:`subprocess.Popen`, what is needed here."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None if it runs."""

    def kill(self) -> None:
        """End it, unless it has ended."""


def start(command: Sequence[str], *, stdin: int, stdout: int, lock: int) -> Process:
    """Start a program that opens NVML.

    Args:
        command: the interpreter, its options -I and -S, the program's path, and its words.
        stdin: a descriptor, or ``subprocess.DEVNULL``.
        stdout: a descriptor.
        lock: that of NVML, or :data:`~integration.nvml.lock.NONE`.

    Raises:
        OSError: it cannot be started.
    """
    if (server := _SERVER.get()) is not None:
        return server.fork(command, stdin, stdout, lock)
    return subprocess.Popen(
        command, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, env={}, cwd="/",
        start_new_session=True, pass_fds=() if lock == NONE else (lock,),
    )  # fmt: skip


def parent() -> int:
    """The process whose child what :func:`start` starts is.

    Raises:
        OSError: it cannot be started.
    """
    server = _SERVER.get()
    return os.getpid() if server is None else server.begin()


@contextmanager
def forking() -> Iterator[None]:
    """Have programs be forked by a server meanwhile, in this context and in those made of it."""
    server = _Server()
    token = _SERVER.set(server)
    try:
        yield
    finally:
        _SERVER.reset(token)
        server.end()


class _Server:
    """One that forks, for several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._calls = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def begin(self) -> int:
        """Have it run; its process id."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._calls.close()
                self._calls, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with its:
                    self._process = subprocess.Popen(
                        [sys.executable, "-I", "-S", server_program.__file__, modules_directory()],
                        stdin=its.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                        env={}, cwd="/", start_new_session=True,
                    )  # fmt: skip
            return self._process.pid

    def fork(self, command: Sequence[str], stdin: int, stdout: int, lock: int) -> _Forked:
        """Have a program be forked.

        Raises:
            OSError: there is no server, it does not know the program, or it cannot fork.
        """
        _, _, _, program, *words = command
        call = json.dumps({"program": program, "words": words}).encode()
        mine, its = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        given = [nothing if stdin == subprocess.DEVNULL else stdin, stdout, its]
        try:
            with self._lock:
                self.begin()
                self._calls.settimeout(_TO_FORK)
                socket.send_fds(self._calls, [call], given + ([] if lock == NONE else [lock]))
                told = self._calls.recv(_LONGEST)
                if not told:
                    raise BrokenPipeError("the server that forks has ended")
        except OSError:
            os.close(mine)
            self.end()
            raise
        finally:
            os.close(nothing)
            os.close(its)
        if (pid := int(told)) < 0:
            os.close(mine)
            raise OSError(-pid, os.strerror(-pid), program)
        return _Forked(self, pid, mine)

    def kill(self, pid: int) -> None:
        """Have a program be killed that it has not reaped yet."""
        with self._lock, suppress(OSError):  # without a server, it has ended
            self._calls.send(json.dumps({"kill": pid}).encode())

    def end(self) -> None:
        """End it, and what it has forked."""
        with self._lock:
            self._calls.close()
            if self._process is not None:
                try:
                    self._process.wait(_TO_END)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
            self._process = None


class _Forked:
    """A program that the server has forked.

    Args:
        server: which one.
        status: where its exit status will be told. Without one, the server has ended.
    """

    def __init__(self, server: _Server, pid: int, status: int) -> None:
        self.pid = pid
        self._server, self._status = server, os.fdopen(status, "rb", buffering=0)
        self._ended: int | None = None

    def poll(self) -> int | None:
        """See :class:`Process`."""
        if self._ended is None and (told := self._status.read(_LONGEST)) is not None:
            self._ended = int(told or -signal.SIGKILL)
            self._status.close()
        return self._ended

    def kill(self) -> None:
        """See :class:`Process`."""
        if self.poll() is None:
            self._server.kill(self.pid)


_SERVER: Final[ContextVar[_Server | None]] = ContextVar("_SERVER", default=None)
