"""Find, start, query, configure and stop one control daemon.

Rules
- A daemon outlives the agent that started it, because clients need it. The next agent finds it by
  its lock: the daemon and its servers inherit the open lock file and hold the lock until they exit.
  The agent takes the lock before it starts the daemon. So if the agent is killed in between, it
  leaves no daemon that the next one cannot find. The daemon writes its pid into the lock file.
- A daemon that answers without holding the lock belongs to another program, and the agent does not
  touch it.
- If only servers hold the lock, the daemon has died. While one of them may have clients, the agent
  starts no new daemon: the servers still hold the GPU.
- The driver's own control program sends commands: it reads one command from stdin and prints the
  answer. A late or unintelligible answer is a failure. The exit status does not help: it is 0
  even for an unknown command.

Sources: flock(2); pidfd_open(2); nvidia-cuda-mps-control(1).
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from api.errors import one_line
from api.values import dataclass
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

__all__ = ["Daemon", "RunningDaemon"]

TIMEOUT: Final = 3.0 * PATIENCE
"""Seconds that an answer may take. A working daemon answers within milliseconds."""

_POLL: Final = 0.02
_TO_WRITE_LOCK: Final = 3.0 * PATIENCE  # a Python has to start for it
_MOST_LOG: Final = 4 << 20
_TAIL: Final = 4096
_SOCKET: Final = "control"
_LOCK: Final = 3  # the lock's descriptor in the daemon
_LONGEST: Final = 1 << 16
_HIGHEST_PID: Final = 1 << 22


@dataclass(frozen=True, slots=True)
class RunningDaemon:
    """A daemon that holds the lock, or whose servers do."""

    pid: int  # the daemon; 0 if it has died, and only its servers are left
    devices: tuple[str, ...]  # UUIDs of the GPUs that it serves
    driver: str  # version of the driver that it was started from


class Daemon:
    """The control daemon of one resource. Every method may block for a few seconds."""

    def __init__(self, config: Config, places: Places) -> None:
        self._config = config
        self._places = places
        self._procfs = Procfs()

    # -- find -------------------------------------------------------------------------------------

    def find(self) -> RunningDaemon | None:
        """Return the daemon that holds the lock; None if the lock is free.

        Raises:
            MpsStateUnusable: a process holds the lock, but the lock file does not name it.
        """
        deadline = time.monotonic() + _TO_WRITE_LOCK
        while is_locked(self._places.lock):
            running = self._read()
            if running is not None:
                return running
            if time.monotonic() > deadline:
                raise MpsStateUnusable(
                    f"the MPS control daemon of {self._places.resource}",
                    found=f"{self._places.lock} is locked, and does not name the process",
                    do="find the process with lsof, and stop it",
                )
            time.sleep(_POLL)
        return None

    def _read(self) -> RunningDaemon | None:
        try:
            content: Any = parse_json(read_file(self._places.lock) or b"")
            pid, start = int(content["pid"]), int(content["start"])
            devices = tuple(str(each) for each in content["devices"])
            driver = str(content["driver"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        status = self._procfs.status(pid)
        alive = status is not None and status.start_time == start and not status.is_zombie
        return RunningDaemon(pid if alive else 0, devices, driver)

    def holders(self) -> tuple[int, ...]:
        """Return the processes that have the lock file open: the daemon and its servers."""
        others = (pid for pid in self._procfs.pids() if pid != os.getpid())
        return tuple(pid for pid in others if self._procfs.has_open(pid, self._places.lock))

    # -- start ------------------------------------------------------------------------------------

    def start(self, plan: Plan) -> int:
        """Start the daemon while the lock is free; it answers a moment later.

        Returns:
            The pid of the daemon.

        Raises:
            NodeAgentError: a directory, the shared memory or a compute mode cannot be prepared, or
                another process holds the lock.
            DriverNotFound: the driver was removed.
            DriverMismatch: the driver's files and the kernel module have different versions.
        """
        places, programs = self._places, plan.programs
        self._refuse_strangers(plan)
        host_setup.prepare(places, self._config.sys)
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
            cgroups=host_setup.daemon_cgroups(),
            lock=_LOCK,
            record={"devices": plan.devices, "driver": plan.driver},
        )
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, places.log_file, append, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        try:
            with self._locked() as lock:
                actions.insert(0, (os.POSIX_SPAWN_DUP2, lock, _LOCK))
                # Signals to the agent's process group must not reach the daemon: setsid.
                return os.posix_spawn(argv[0], argv, {}, file_actions=actions, setsid=True)
        except OSError as error:
            raise host_setup.unusable(places, error) from error

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock, which a process started meanwhile can inherit; yield its descriptor.

        Raises:
            MpsDaemonFailed: another process holds the lock.
            OSError: the lock file cannot be opened.
        """
        create = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._places.lock, create, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._failed("another process holds its lock") from None
            os.ftruncate(fd, 0)  # the content is that of a dead process
            yield fd
        finally:
            os.close(fd)

    def _refuse_strangers(self, plan: Plan) -> None:
        """Refuse to start if another program's daemon, such as NVIDIA's, serves the directory.

        Raises:
            MpsStateUnusable: such a daemon answers.
        """
        if not os.path.lexists(os.path.join(self._places.pipe, _SOCKET)):
            return
        with suppress(MpsDaemonFailed):
            self.percentage(plan.programs)
            raise MpsStateUnusable(
                f"to start the MPS control daemon of {self._places.resource}",
                found=f"a daemon of another program serves {self._places.pipe}",
                do="stop that program; it may be NVIDIA's mps-control-daemon",
            )

    def answers(self, pid: int, plan: Plan) -> bool:
        """Whether a daemon that was started answers already.

        Raises:
            MpsDaemonFailed: the daemon has exited.
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
        """Set the daemon's limits, and check that it applied them.

        Args:
            devices: the devices that it was started with, in its order.

        Raises:
            MpsDaemonFailed: it did not apply them.
        """
        for command in plan.commands(devices):
            self.ask(plan.programs, command)
        percentage = self.percentage(plan.programs)
        if round(percentage) != plan.percentage:
            raise self._failed(f"its limit is {percentage:g} % of threads, not {plan.percentage}")
        for number, uuid in plan.limited(devices):
            # The answer is rounded down to gigabytes, so it only shows whether there is a limit.
            if not self.ask(plan.programs, f"get_default_device_pinned_mem_limit {number}"):
                raise self._failed(f"it has no limit for the memory of {uuid}")

    # -- query ------------------------------------------------------------------------------------

    def ask(self, programs: Programs, command: str) -> str:
        """Send one command of the manual page, and return the answer without outer white space.

        Raises:
            MpsDaemonFailed: no daemon runs, or it does not answer.
        """
        try:
            done = self._run(programs, command)
        except subprocess.TimeoutExpired as error:
            raise _unanswered(command, f"no answer within {TIMEOUT:g} s") from error
        answer = done.stdout[:_LONGEST].decode(errors="replace").strip()
        if done.returncode:
            reason = done.stderr[:_LONGEST].decode(errors="replace").strip() or answer
            reason = reason or f"the control program exited with status {done.returncode}"
            raise _unanswered(command, reason)
        return answer

    def _run(self, programs: Programs, command: str) -> subprocess.CompletedProcess[bytes]:
        places = self._places
        environment = programs.environment(places.pipe, places.log)
        argv = [programs.control]
        if programs.root:
            mounts = {"binds": (places.directory,), "dev": self._config.dev}
            argv = launch_line(programs.control, programs.root, environment, **mounts)
        try:
            env = {} if programs.root else environment
            return run_for(argv, TIMEOUT, env=env, given=f"{command}\n".encode())
        except OSError as error:
            raise _unanswered(command, f"{programs.control}: {error.strerror}") from error

    def quit(self, programs: Programs) -> None:
        """Make the daemon quit once its clients have exited; until then it does not answer.

        Raises:
            MpsDaemonFailed: the control program cannot be started.
        """
        with suppress(subprocess.TimeoutExpired):
            self._run(programs, "quit")

    def percentage(self, programs: Programs) -> float:
        """Return the percentage of the threads that a client may use; any answer proves it runs.

        Raises:
            MpsDaemonFailed: no daemon answers.
        """
        command = "get_default_active_thread_percentage"
        answer = self.ask(programs, command)
        try:
            return float(answer)
        except ValueError:
            raise _unanswered(command, f"the answer {answer[:80]!r}") from None

    def clients(self, programs: Programs) -> tuple[int, ...]:
        """Return the processes that use the daemon's servers.

        Raises:
            MpsDaemonFailed: the daemon does not answer.
        """
        servers = _pids(self.ask(programs, "get_server_list"))
        answers = (self.ask(programs, f"get_client_list {pid}") for pid in servers)
        return tuple(client for answer in answers for client in _pids(answer))

    # -- stop -------------------------------------------------------------------------------------

    def ended(self, pid: int) -> str:
        """Return how a daemon ended, and reap it if it is a child of this process.

        Returns:
            A few words; "" while it runs.
        """
        with suppress(ChildProcessError):
            result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
            if result is None:
                return ""
            how = "status" if result.si_code == os.CLD_EXITED else "signal"
            last = self.last_words()
            return f"it ended with {how} {result.si_status}" + (f": {last}" if last else "")
        running = self._read()
        return "" if running is not None and running.pid == pid else "it ended"

    def kill(self, pid: int) -> None:
        """Kill a daemon that does not work, and wait until it is gone."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + TIMEOUT
        while not self.ended(pid) and time.monotonic() < deadline:
            time.sleep(_POLL)

    def last_words(self) -> str:
        """Return the last line of its log; "" for none."""
        try:
            with open(self._places.log_file, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return one_line(next((line for line in reversed(lines) if line.strip()), ""))[:200]

    def trim_log(self) -> None:
        """Truncate the log of a running daemon if it is too large; the daemon appends to it."""
        with suppress(OSError):
            if os.stat(self._places.log_file).st_size > _MOST_LOG:
                os.truncate(self._places.log_file, 0)

    def _rotate(self) -> None:
        """Keep the log of the previous daemon as a second file if it is large."""
        with suppress(OSError):
            if os.stat(self._places.log_file).st_size > _MOST_LOG // 4:
                os.rename(self._places.log_file, f"{self._places.log_file}.1")

    def clean_up(self, in_use: frozenset[str]) -> None:
        """Restore the compute modes and remove the files of a daemon that has exited.

        Args:
            in_use: UUIDs of GPUs whose compute mode another daemon needs.

        Raises:
            ComputeModeFailed: a mode could not be restored; its record and all files stay.
        """
        places = self._places
        if not (os.path.lexists(places.devices) or os.path.lexists(places.lock)):
            return  # no agent had a daemon here; the files belong to another program
        gone = set(modes.taken(places)) - in_use
        modes.give_back(self._config, places, gone)
        host_setup.clear(places)

    def _failed(self, found: str) -> MpsDaemonFailed:
        return MpsDaemonFailed(
            f"the MPS control daemon of {self._places.resource}",
            found=found,
            do=f"read {self._places.log_file}; the node agent starts it again",
        )


def _pids(answer: str) -> tuple[int, ...]:
    """Return the lines that are a pid; for a server that just exited, the answer is a sentence."""
    words = (line.strip() for line in answer.splitlines())
    return tuple(int(word) for word in words if word.isdecimal() and int(word) <= _HIGHEST_PID)


def _unanswered(command: str, found: str) -> MpsDaemonFailed:
    return MpsDaemonFailed(
        f"{command} of the MPS control daemon",
        found=found,
        do="read its log, control.log below mpsRoot; the node agent starts it again",
    )
