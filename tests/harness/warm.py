"""Run our programs as processes, without the quarter of a second that their imports take.

:class:`Warm` is like ``subprocess.Popen`` of ``python -m MODULE WORDS``. A server that has imported
the programs' modules forks the process (:mod:`tests.harness.warm_server`); from outside it looks
like a new one. Tests of how a program starts, what it imports, or what its interpreter inherits
start it themselves.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any, Final

from tests.harness.launcher import REPOSITORY
from tests.harness.own_process import outliving

__all__ = ["LONGEST", "PROGRAM", "Warm"]

PROGRAM: Final = (sys.executable, "-m")
"""The start of a process's command line, before the name of the module."""

LONGEST: Final = 1 << 17
"""The maximum size in bytes of a call of the server."""

# What the interpreter, the loader and modules read of the environment as they start.
_READ_AT_START: Final = ("PYTHON", "LD_", "LANG", "LC_", "GRPC_", "MALLOC_", "NVSHIM_PATIENCE")


class Warm(subprocess.Popen[Any]):
    """A process that runs a module, in the checkout's directory.

    Args:
        words: the module's arguments.
        options: those of ``subprocess.Popen``: the streams and their encoding, ``env`` and
            ``start_new_session``.
    """

    def __init__(self, module: str, *words: str, **options: Any) -> None:
        super().__init__([*PROGRAM, module, *words], **options)

    def _execute_child(
        self, args: list[str], executable: None, preexec_fn: None, close_fds: bool,
        pass_fds: tuple[int, ...], cwd: str | None, env: Mapping[str, str] | None,
        startupinfo: None, creationflags: int, shell: bool, p2cread: int, p2cwrite: int,
        c2pread: int, c2pwrite: int, errread: int, errwrite: int, restore_signals: bool,
        gid: None, gids: None, uid: None, umask: int, start_new_session: bool, process_group: int,
    ) -> None:  # fmt: skip
        """Let the server fork instead of ``subprocess``, which does the rest."""
        environment = dict(os.environ if env is None else env)
        given = zip((p2cread, c2pwrite, errwrite), range(3), strict=True)
        streams = [own if own >= 0 else inherited for own, inherited in given]
        call = {"argv": args, "env": environment, "session": start_new_session}
        self.pid = _server(_of_the_start(environment)).fork(json.dumps(call).encode(), streams)
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
        )


class _Server:
    """A server that forks processes during the test run."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._calls, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.warm_server"],
                stdin=its.fileno(), stdout=subprocess.DEVNULL, cwd=REPOSITORY, env=environment,
            )  # fmt: skip

    def fork(self, call: bytes, streams: list[int]) -> int:
        """Fork a process for a call, as a child of this process; return its pid."""
        with self._lock:
            socket.send_fds(self._calls, [call], streams)
            pid = self._calls.recv(16)
        assert pid, "the server of warm programs has ended"
        return int(pid)


@functools.cache
def _server(environment: tuple[tuple[str, str], ...]) -> _Server:
    with outliving():
        return _Server(dict(environment))


def _of_the_start(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variables that the server itself has to start with."""
    return tuple(sorted(e for e in environment.items() if e[0].startswith(_READ_AT_START)))
