"""One control daemon: found again, started, asked, given its limits, stopped.

Rules
- A daemon outlives the agent that started it, for the sake of its clients. Its successor finds it
  by the lock, which the daemon has inherited open and holds until it is dead; so do its servers.
  What the lock's file says is written by who holds it, and tells which process is the daemon.
- A daemon that answers without having the lock is somebody else's, and is left alone.
- A lock that is held by nobody but servers is that of a daemon that died. While one of those may
  have clients there is no new daemon: the GPU is theirs.
- Nobody but the driver's own program speaks its protocol: one command on that one's stdin, the
  answer on its stdout. An answer that does not come in time is a failure; so is one that makes no
  sense. An unknown command, too, is answered with status 0.

Sources: flock(2); pidfd_open(2); nvidia-cuda-mps-control(1).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from api.errors import one_line
from hooks.config import Config
from integration.agent_errors import MpsDaemonFailed, MpsStateUnusable
from integration.containers.procfs import Procfs
from integration.driver_launch import launch_line
from integration.driver_programs import run_for
from integration.files import read_file
from integration.json_documents import parse_json
from integration.node.mps.paths import Places, shm
from integration.node.mps.plan import Plan, Programs
from integration.node.services.mps import compute_modes as modes
from integration.node.services.mps import host_setup
from integration.timeouts import PATIENCE
from shim.causes.agent import is_locked

__all__ = ["Daemon", "Found"]

TIMEOUT: Final = 3.0 * PATIENCE
"""Seconds that an answer may take. A daemon that lives gives it within milliseconds."""

_POLL: Final = 0.02
_TO_NOTE: Final = 1.0
_MOST_LOG: Final = 4 << 20
_TAIL: Final = 4096
_SOCKET: Final = "control"
_LONGEST: Final = 1 << 16
_HIGHEST_PID: Final = 1 << 22


@dataclass(frozen=True, slots=True)
class Found:
    """Who has the lock."""

    pid: int  # the daemon; 0 if it has died, and only servers of it are left
    devices: tuple[str, ...]  # UUIDs of the GPUs that it serves
    driver: str  # version of the driver that it is of


class Daemon:
    """The control daemon of one resource. All of it blocks, for seconds at most."""

    def __init__(self, config: Config, places: Places) -> None:
        self._config = config
        self._places = places
        self._procfs = Procfs()

    # -- found again ------------------------------------------------------------------------------

    def find(self) -> Found | None:
        """Who has the lock, if anybody has.

        Raises:
            MpsStateUnusable: it is locked, and does not say by whom.
        """
        deadline = time.monotonic() + _TO_NOTE
        while is_locked(self._places.lock):
            found = self._read()
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise MpsStateUnusable(
                    f"the MPS control daemon of {self._places.resource}",
                    found=f"{self._places.lock} is locked, and does not say by whom",
                    do="see with lsof who has it, and end that",
                )
            time.sleep(_POLL)
        return None

    def _read(self) -> Found | None:
        try:
            said: Any = parse_json(read_file(self._places.lock) or b"")
            pid, start = int(said["pid"]), int(said["start"])
            devices = tuple(str(each) for each in said["devices"])
            driver = str(said["driver"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        status = self._procfs.status(pid)
        alive = status is not None and status.start_time == start and not status.is_zombie
        return Found(pid if alive else 0, devices, driver)

    def holders(self) -> tuple[int, ...]:
        """The processes that have the lock's file open: the daemon, and its servers."""
        others = (pid for pid in self._procfs.pids() if pid != os.getpid())
        return tuple(pid for pid in others if self._procfs.has_open(pid, self._places.lock))

    # -- started ----------------------------------------------------------------------------------

    def start(self, plan: Plan) -> int:
        """Start the daemon, which answers a moment later.

        Args:
            plan: what it is to be like. Nobody has the lock.

        Raises:
            NodeAgentError: what it needs cannot be had.
            DriverNotFound: there is no driver any more.
            DriverMismatch: the driver's files are of another version.
        """
        places, programs = self._places, plan.programs
        self._refuse_strangers(plan)
        host_setup.lay(places, self._config.sys)
        host_setup.empty_pipe(places)
        self._rotate()
        modes.take(self._config, places, plan.gpus)
        argv = launch_line(
            programs.control,
            programs.root,
            programs.environment(places.pipe, places.log, plan.devices),
            arguments=["-f", *plan.options],
            binds=(places.directory,),
            dev=self._config.dev,
            shm=shm(places.root),
            cgroup=host_setup.CGROUP,
            lock=places.lock,
            record={"devices": plan.devices, "driver": plan.driver},
        )
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        return os.posix_spawn(
            argv[0],
            argv,
            {},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, places.log_file, append, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,  # what is said to the agent's group is not said to it
        )

    def _refuse_strangers(self, plan: Plan) -> None:
        """Leave a daemon alone that serves here and is none of ours: NVIDIA's plugin has them too.

        Raises:
            MpsStateUnusable: there is one.
        """
        if not os.path.lexists(os.path.join(self._places.pipe, _SOCKET)):
            return
        with suppress(MpsDaemonFailed):
            self.percentage(plan.programs)
            raise MpsStateUnusable(
                f"to start the MPS control daemon of {self._places.resource}",
                found=f"another one, which this agent has not started, serves {self._places.pipe}",
                do="end it, or what keeps it: it may be NVIDIA's mps-control-daemon",
            )

    def answers(self, pid: int, plan: Plan) -> bool:
        """Whether one that was started answers by now.

        Raises:
            MpsDaemonFailed: it has ended.
        """
        if ended := self.ended(pid):
            raise self._failed(ended)
        if not os.path.exists(os.path.join(self._places.pipe, _SOCKET)):
            return False
        with suppress(MpsDaemonFailed):
            self.percentage(plan.programs)
            return True
        return False

    def configure(self, plan: Plan, devices: tuple[str, ...]) -> None:
        """Give the daemon its limits, and see that it has them.

        Args:
            devices: those that it was started with, in its order.

        Raises:
            MpsDaemonFailed: it does not take them.
        """
        for command in plan.commands(devices):
            self.ask(plan.programs, command)
        percentage = self.percentage(plan.programs)
        if round(percentage) != plan.percentage:
            raise self._failed(f"{percentage:g} % of threads, not {plan.percentage}")

    # -- asked ------------------------------------------------------------------------------------

    def ask(self, programs: Programs, command: str) -> str:
        """The answer to one command of the manual page, without white space around it.

        Raises:
            MpsDaemonFailed: there is no daemon, or it does not answer.
        """
        try:
            done = self._run(programs, command)
        except subprocess.TimeoutExpired as error:
            raise _unanswered(command, f"no answer within {TIMEOUT:g} s") from error
        answer = done.stdout[:_LONGEST].decode(errors="replace").strip()
        if done.returncode:
            said = done.stderr[:_LONGEST].decode(errors="replace").strip() or answer
            raise _unanswered(command, said or f"status {done.returncode} of the control program")
        return answer

    def _run(self, programs: Programs, command: str) -> subprocess.CompletedProcess[bytes]:
        places = self._places
        environment = programs.environment(places.pipe, places.log)
        argv = [programs.control]
        if programs.root:
            more = {"binds": (places.directory,), "dev": self._config.dev}
            argv = launch_line(programs.control, programs.root, environment, **more)
        try:
            env = {} if programs.root else environment
            return run_for(argv, TIMEOUT, env=env, given=f"{command}\n".encode())
        except OSError as error:
            raise _unanswered(command, f"{programs.control}: {error.strerror}") from error

    def quit(self, programs: Programs) -> None:
        """Tell the daemon to end as soon as its clients have; until then it does not answer.

        Raises:
            MpsDaemonFailed: the control program cannot be started.
        """
        with suppress(subprocess.TimeoutExpired):
            self._run(programs, "quit")

    def percentage(self, programs: Programs) -> float:
        """The threads that a client may have, in percent; that it is answered shows a daemon.

        Raises:
            MpsDaemonFailed: it is not.
        """
        command = "get_default_active_thread_percentage"
        answer = self.ask(programs, command)
        try:
            return float(answer)
        except ValueError:
            raise _unanswered(command, f"the answer {answer[:80]!r}") from None

    def clients(self, programs: Programs) -> tuple[int, ...]:
        """The processes that use the daemon's servers.

        Raises:
            MpsDaemonFailed: the daemon does not say.
        """
        servers = _pids(self.ask(programs, "get_server_list"))
        told = (self.ask(programs, f"get_client_list {pid}") for pid in servers)
        return tuple(client for answer in told for client in _pids(answer))

    # -- ended ------------------------------------------------------------------------------------

    def ended(self, pid: int) -> str:
        """How a daemon ended, if it has; it is reaped if it was started by this process.

        Returns:
            A few words; "" while it lives.
        """
        with suppress(ChildProcessError):
            result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
            if result is None:
                return ""
            how = "status" if result.si_code == os.CLD_EXITED else "signal"
            last = self.last_words()
            return f"it ended with {how} {result.si_status}" + (f": {last}" if last else "")
        found = self._read()
        return "" if found is not None and found.pid == pid else "it ended"

    def kill(self, pid: int) -> None:
        """End a daemon that does not do what it is to, at once."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + TIMEOUT
        while not self.ended(pid) and time.monotonic() < deadline:
            time.sleep(_POLL)

    def last_words(self) -> str:
        """The last line of its log; "" for none."""
        try:
            with open(self._places.log_file, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return one_line(next((line for line in reversed(lines) if line.strip()), ""))[:200]

    def trim_log(self) -> None:
        """Keep the log of a daemon that lives from growing for ever: it is written by appending."""
        with suppress(OSError):
            if os.stat(self._places.log_file).st_size > _MOST_LOG:
                os.truncate(self._places.log_file, 0)

    def _rotate(self) -> None:
        """Keep what the daemon before has said."""
        with suppress(OSError):
            if os.stat(self._places.log_file).st_size > _MOST_LOG // 4:
                os.rename(self._places.log_file, f"{self._places.log_file}.1")

    def take_away(self, spared: frozenset[str]) -> None:
        """Set back what was set for a daemon that is no more.

        Args:
            spared: UUIDs of GPUs whose compute mode another daemon needs.

        Raises:
            ComputeModeFailed: one could not be set back; it stays noted, with all the rest.
        """
        places = self._places
        if not (os.path.lexists(places.devices) or os.path.lexists(places.lock)):
            return  # there has been none; what is there is somebody else's
        gone = set(modes.taken(places)) - spared
        modes.give_back(self._config, places, gone)
        host_setup.clear(places)

    def _failed(self, found: str) -> MpsDaemonFailed:
        return MpsDaemonFailed(
            f"the MPS control daemon of {self._places.resource}",
            found=found,
            do=f"see {self._places.log_file}; the node agent starts it again",
        )


def _pids(answer: str) -> tuple[int, ...]:
    """The lines that are one pid; a server that has just ended is answered in words."""
    words = (line.strip() for line in answer.splitlines())
    return tuple(int(word) for word in words if word.isdecimal() and int(word) <= _HIGHEST_PID)


def _unanswered(command: str, found: str) -> MpsDaemonFailed:
    return MpsDaemonFailed(
        f"{command} of the MPS control daemon",
        found=found,
        do="see its log, control.log below mpsRoot; the node agent starts it again",
    )
