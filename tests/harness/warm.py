"""Programs of ours as processes, without the quarter of a second in which each imports its modules.

:class:`Warm` is what ``subprocess.Popen`` is for ``python -m MODULE WORDS``. The process is forked
by a server that has imported what the programs are made of (:mod:`tests.harness.warm_server`); from
outside it is one that was started. Tests of how a program starts, what it imports, and what is
around its interpreter start it themselves.
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
"""What the name of a module follows, in the command line of a process."""

LONGEST: Final = 1 << 17
"""Bytes that a call of the server may have."""

# What the interpreter, the loader and modules read of the environment as they start.
_READ_AT_START: Final = ("PYTHON", "LD_", "LANG", "LC_", "GRPC_", "MALLOC_", "NVSHIM_PATIENCE")


class Warm(subprocess.Popen[Any]):
    """A process that runs a module, in the checkout's directory.

    Args:
        words: what follows it on the command line.
        options: of ``subprocess.Popen``: the streams and their form, ``env`` and
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
        """Have the server fork, in place of what ``subprocess`` does; the rest is as there."""
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
    """One that forks, for the length of the test run."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._calls, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.warm_server"],
                stdin=its.fileno(), stdout=subprocess.DEVNULL, cwd=REPOSITORY, env=environment,
            )  # fmt: skip

    def fork(self, call: bytes, streams: list[int]) -> int:
        """Have a process for a call; its pid. It is a child of ours."""
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
    """What of an environment has to be the server's own."""
    return tuple(sorted(e for e in environment.items() if e[0].startswith(_READ_AT_START)))
