"""The language of the control program: one command on its stdin, the answer on its stdout.

Rules
- Nobody but the driver's own program speaks the daemon's protocol, which is NVIDIA's.
- An answer that does not come in time is a failure; so is one that makes no sense. An unknown
  command, too, is answered with status 0.

Source: nvidia-cuda-mps-control(1).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from integration.node.errors import MpsDaemonFailed
from integration.node.mps.places import Places
from integration.timeouts import PATIENCE

if TYPE_CHECKING:
    from integration.node.mps.plan import Programs

TIMEOUT: Final = 3.0 * PATIENCE
"""Seconds that an answer may take. A daemon that lives gives it within milliseconds."""

_LAUNCH: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "launch.py")
_LONGEST: Final = 1 << 16
_HIGHEST_PID: Final = 1 << 22


def command_line(programs: Programs, environment: dict[str, str], **more: Any) -> list[str]:
    """How the control program is started.

    Args:
        environment: all of its own; the command itself needs none.
        more: what else :mod:`integration.node.mps.launch` is told, by its words.
    """
    return launch_line(programs.control, programs.root, environment, **more)


def launch_line(program: str, root: str, environment: dict[str, str], **more: Any) -> list[str]:
    """How a program of the driver's is started; arguments and what :func:`command_line` says.

    Args:
        program: its path below the root.
        root: its root directory; "" for the host's.
    """
    wish = {"program": program, "environment": environment, "root": root}
    return [sys.executable, "-I", "-S", _LAUNCH, json.dumps({**wish, **more})]


class Control:
    """Speaks to the control daemon of one resource."""

    def __init__(self, programs: Programs, places: Places, dev: str) -> None:
        self._programs = programs
        self._places = places
        self._dev = dev

    def ask(self, command: str) -> str:
        """The answer to one command of the manual page, without white space around it.

        Raises:
            MpsDaemonFailed: there is no daemon, or it does not answer.
        """
        try:
            done = self._run(command)
        except subprocess.TimeoutExpired as error:
            raise _failed(command, f"no answer within {TIMEOUT:g} s") from error
        answer = done.stdout[:_LONGEST].decode(errors="replace").strip()
        if done.returncode:
            said = done.stderr[:_LONGEST].decode(errors="replace").strip() or answer
            raise _failed(command, said or f"status {done.returncode} of the control program")
        return answer

    def _run(self, command: str) -> subprocess.CompletedProcess[bytes]:
        programs, places = self._programs, self._places
        environment = programs.environment(places.pipe, places.log)
        argv = (
            command_line(programs, environment, binds=(places.directory,), dev=self._dev)
            if programs.root
            else [programs.control]
        )
        try:
            return subprocess.run(
                argv,
                input=f"{command}\n".encode(),
                capture_output=True,
                env={} if programs.root else environment,
                timeout=TIMEOUT,
                check=False,
            )
        except OSError as error:
            raise _failed(command, f"{programs.control}: {error.strerror}") from error

    def quit(self) -> None:
        """Tell the daemon to end as soon as its clients have; until then it does not answer.

        Raises:
            MpsDaemonFailed: the control program cannot be started.
        """
        with suppress(subprocess.TimeoutExpired):
            self._run("quit")

    def percentage(self) -> float:
        """The threads that a client may have, in percent; that it is answered shows a daemon.

        Raises:
            MpsDaemonFailed: it is not.
        """
        command = "get_default_active_thread_percentage"
        answer = self.ask(command)
        try:
            return float(answer)
        except ValueError:
            raise _failed(command, f"the answer {answer[:80]!r}") from None

    def clients(self) -> tuple[int, ...]:
        """The processes that use the daemon's servers.

        Raises:
            MpsDaemonFailed: the daemon does not say.
        """
        servers = _pids(self.ask("get_server_list"))
        return tuple(
            client for pid in servers for client in _pids(self.ask(f"get_client_list {pid}"))
        )


def _pids(answer: str) -> tuple[int, ...]:
    """The lines that are one pid; a server that has just ended is answered in words."""
    words = (line.strip() for line in answer.splitlines())
    return tuple(int(word) for word in words if word.isdecimal() and int(word) <= _HIGHEST_PID)


def _failed(command: str, found: str) -> MpsDaemonFailed:
    return MpsDaemonFailed(
        f"{command} of the MPS control daemon",
        found=found,
        do="see its log, control.log below mpsRoot; the node agent starts it again",
    )
