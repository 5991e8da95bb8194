"""Call the low-level OCI runtime (runc or crun) as a program.

Both take the same arguments and report errors as JSON objects in a log file of our choice; the last
object is the one for users. A runtime that crashes or cannot start writes to its stderr instead,
which is read unless a process of the container has inherited it.

Source: opencontainers/runtime-tools command line interface; runc(8), crun(1).
"""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from typing import Final

from api.errors import one_line
from shim import bundle as bundle_files
from shim import files, loop, syscalls
from shim.children import Child, Exit, Reaper, run, spawn
from shim.errors import ProcessFinished, ProgramTimeout, RuntimeFailed
from shim.processes import kill_family
from shim.runtime.fast_path import FastPath
from shim.runtime.options import RuntimeOptions
from shim.stdio import ChildStdio

# The errors of runc and crun for a process that has already ended: containerd expects NOT_FOUND.
_GONE: Final = (
    "process already finished",
    "container not running",
    "no such process",
    "does not exist",
    "is not running",
)

# The verbs with that meaning; create and exec report other missing things.
_OF_A_CONTAINER: Final = frozenset({"start", "kill", "pause", "resume", "update", "delete"})

# containerd sets it to limit its own shim. Go prepares for each processor: with 128 of them, runc
# exec takes an eighth more processor time than with two.
_GO_LIMIT: Final = "GOMAXPROCS"

_LOG_LIMIT: Final = 1 << 16
_STDERR: Final = 2
_STDERR_LIMIT: Final = 1 << 12

# An entry starts a line. runc's is one line; crun's from json-c has several.
_OBJECT: Final = re.compile(r"^\{", re.MULTILINE)
_DECODER: Final = json.JSONDecoder()

# The verbs whose children outlive the call.
_STARTS_PROCESSES: Final = frozenset({"create", "exec", "restore"})

# Seconds for a runtime to print its help.
_HELP_TIMEOUT: Final = 5.0

# Seconds for a call that depends only on the kernel. create, start, exec and similar calls may run
# hooks or write much, so they have no limit.
_PATIENCE: Final = {"kill": 15, "pause": 30, "resume": 30, "update": 30, "delete": 30}

# Seconds for a runtime to die of SIGKILL.
_DYING: Final = 2.0

POINTLESS: Final = ("start", "exec", "pause", "resume", "update")
"""The verbs that are pointless after init has ended."""


class LowLevelRuntime:
    """Calls one runtime for one container.

    Args:
        reaper: waits for the runtime's processes.
        options: the runtime, and its options.
        container_id: the container's id in the runtime.
        root: the directory of the runtime's state for the container's namespace.
        bundle: the container's bundle, for the calls' log files.
        mapped: whether the container has a user namespace.
    """

    _calls = itertools.count()

    def __init__(
        self,
        reaper: Reaper,
        options: RuntimeOptions,
        *,
        container_id: str,
        root: str,
        bundle: str,
        mapped: bool = False,
    ) -> None:
        self._reaper = reaper
        self._options = options
        self._id = container_id
        self._root = root
        self._bundle = bundle
        self._mapped = mapped
        self._under_way: dict[Child, str] = {}
        # For calls once the container's init process exists.
        self._fast_path: FastPath | None = None

    async def create(self, stdio: ChildStdio, *, pid_file: str) -> None:
        """Create the container and its init process, which waits for :meth:`start`."""
        arguments = ["--bundle", self._bundle, "--pid-file", pid_file]
        if self._options.no_pivot_root:
            arguments.append("--no-pivot")
        if self._options.no_new_keyring:
            arguments.append("--no-new-keyring")
        await self._call("create", [*arguments, *_console(stdio), self._id], stdio.fds())

    def made(self, init: Child) -> None:
        """Note that the container exists, so that some calls may become unnecessary.

        Args:
            init: its init process, which waits for :meth:`start`.
        """
        self._fast_path = FastPath(
            self._options.binary_name,
            os.path.join(self._root, self._id),
            init,
            systemd_cgroup=self._options.systemd_cgroup,
        )

    async def start(self) -> None:
        """Let the init process execute its program."""
        if self._fast_path is None or not await self._fast_path.start():
            await self._call("start", [self._id])

    async def execute(self, stdio: ChildStdio, *, process_file: str, pid_file: str) -> None:
        """Start another process in the container; return when it runs."""
        arguments = ["--process", process_file, "--pid-file", pid_file, "--detach"]
        await self._call("exec", [*arguments, *_console(stdio), self._id], stdio.fds())

    async def kill(self, signal: int, *, everyone: bool = False) -> None:
        """Signal the init process, or every process of the container."""
        if not everyone and self._fast_path is not None and self._fast_path.kill(signal):
            return
        arguments = ["--all"] if everyone else []
        await self._call("kill", [*arguments, self._id, str(signal)])

    async def pause(self) -> None:
        """Freeze all processes of the container."""
        await self._call("pause", [self._id])

    async def resume(self) -> None:
        """Thaw all processes of the container."""
        await self._call("resume", [self._id])

    async def update(self, resources: bytes) -> None:
        """Change the container's limits.

        Args:
            resources: the new limits, as JSON; missing limits do not change.
        """
        fd = os.memfd_create("resources")
        try:
            os.write(fd, resources)  # into memory, so all at once
            os.lseek(fd, 0, os.SEEK_SET)
            await self._call("update", ["--resources", "-", self._id], {0: fd})
        finally:
            os.close(fd)

    async def checkpoint(self, arguments: Sequence[str], *, environment: Mapping[str, str]) -> None:
        """Save the container.

        Args:
            arguments: the result of :meth:`shim.checkpoint.criu.CheckpointOptions.words`.
            environment: more variables, for the runtime's CRIU.
        """
        await self._call("checkpoint", [*arguments, self._id], environment=environment)

    async def restore(
        self,
        stdio: ChildStdio,
        arguments: Sequence[str],
        *,
        pid_file: str,
        environment: Mapping[str, str],
    ) -> None:
        """Create the container from a checkpoint; it runs when this returns."""
        words = ["--bundle", self._bundle, "--pid-file", pid_file, "--detach"]
        if "crun" not in os.path.basename(self._options.binary_name):
            # crun has neither, and never treats a container's processes as its own.
            words.append("--no-subreaper")
            if self._options.no_pivot_root:
                words.append("--no-pivot")
        words += [*arguments, *_console(stdio), self._id]
        await self._call("restore", words, stdio.fds(), environment=environment)

    async def knows(self, verb: str) -> bool:
        """Whether the runtime has a verb, which depends on its build."""
        done = await run(
            self._reaper, [self._options.binary_name, verb, "--help"], timeout=_HELP_TIMEOUT
        )
        return done.exit.status == 0

    async def delete(self, *, force: bool = False) -> None:
        """Remove the container's cgroup and state; with force, kill what is left of it."""
        if not force and self._fast_path is not None and await self._fast_path.delete():
            return
        arguments = ["--force"] if force else []
        await self._call("delete", [*arguments, self._id])

    async def _call(
        self,
        verb: str,
        arguments: Sequence[str],
        fds: Mapping[int, int] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        fds = dict(fds or {})
        log = bundle_files.begin_call(self._bundle, f"{verb}.{next(self._calls)}")
        argv = [self._options.binary_name, "--root", self._root, "--log", log]
        argv += ["--log-format", "json"]
        if self._options.systemd_cgroup:
            argv.append("--systemd-cgroup")
        # Init and execs without a terminal inherit stderr, whose content must not fill memory.
        inherited = verb in _STARTS_PROCESSES and "--console-socket" not in arguments
        stderr = None if inherited else _memory()
        process_stderr = fds.get(_STDERR)
        null: tuple[int, ...] = ()
        try:
            if null := self._null_for(verb, fds):
                source, sink = null
                fds = {0: source, 1: sink, _STDERR: sink, **fds}
            child = spawn(
                self._reaper,
                [*argv, verb, *arguments],
                fds=fds if stderr is None else {**fds, _STDERR: stderr},
                environment=_limited(environment or {}),
            )
            exit_ = await self._end_of(child, verb)
            if exit_.status:
                raise self._error(verb, exit_.status, log, stderr, process_stderr)
        finally:
            files.remove(log)
            for fd in (stderr, *null):
                if fd is not None:
                    os.close(fd)

    def _null_for(self, verb: str, fds: Mapping[int, int]) -> tuple[int, int] | tuple[()]:
        """Return a replacement for /dev/null for a container with a user namespace, if needed.

        crun before 1.28 makes the container's root the owner of its stdin, stdout and stderr,
        whatever they are. As the owner of the host's /dev/null, that root could deny it to
        everyone.
        """
        if not self._mapped or verb not in _STARTS_PROCESSES or len(fds) > _STDERR:
            return ()
        try:
            return syscalls.null_device()
        except PermissionError:
            return ()  # a shim that may not mount may not give away the host's file either

    async def _end_of(self, child: Child, verb: str) -> Exit:
        """Wait for a call; kill it if it takes too long or is cancelled."""
        self._under_way[child] = verb
        try:
            with loop.move_on_after(_PATIENCE.get(verb)):
                return await child.wait()
            raise ProgramTimeout(
                f"{os.path.basename(self._options.binary_name)} {verb} of {self._id}",
                found=f"it had not ended after {_PATIENCE[verb]} s, and was killed",
                do="look for what holds it up (a frozen cgroup, a hung mount), and ask again",
            )
        finally:
            if child.exit is None:
                kill_family(child.pid)
                with loop.CancelScope(shield=True), loop.move_on_after(_DYING):
                    await child.wait()
            del self._under_way[child]

    def calls(self) -> list[tuple[int, str]]:
        """Return the running calls, each with the runtime's pid and the verb."""
        return [(child.pid, verb) for child, verb in self._under_way.items()]

    def end_calls(self, *verbs: str) -> None:
        """Kill the calls of these verbs, with all that they have started: hooks, CRIU."""
        for child, verb in self._under_way.items():
            if verb in verbs and child.exit is None:
                kill_family(child.pid)

    def _error(
        self, verb: str, status: int, log: str, stderr: int | None, process_stderr: int | None
    ) -> RuntimeFailed | ProcessFinished:
        """Return the error of a failed call.

        Its stderr is None if the container's process has inherited it.
        """
        binary = os.path.basename(self._options.binary_name)
        asked = f"{binary} {verb}"
        said, do = last_error(log), ""
        if not said:
            word = _first_line(
                _waiting(process_stderr) if stderr is None else os.pread(stderr, _STDERR_LIMIT, 0)
            )
            said = f"exit status {status}, and {word or self._silence()}"
            if not word and process_stderr is not None:
                do = "see the container's stderr, which is that of the call"
        # crun's text starts with a capital letter.
        if verb in _OF_A_CONTAINER and any(text in said.lower() for text in _GONE):
            return ProcessFinished(asked, found=said)
        return RuntimeFailed(asked, found=said, do=do, verb=verb)

    def _silence(self) -> str:
        """Return why a failed runtime left nothing in its log."""
        try:
            full = os.statvfs(self._bundle).f_bavail == 0
        except OSError:
            full = False
        return (
            f"no room for a word why: no space left below {self._bundle}"
            if full
            else ("no word why")
        )


def _limited(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables with containerd's limit on Go programs, if any."""
    limit = os.environ.get(_GO_LIMIT)
    return {**environment, _GO_LIMIT: limit} if limit else {**environment}


def _memory() -> int | None:
    """Return a descriptor for a call's stderr; None if that is impossible."""
    try:
        return os.memfd_create("stderr")
    except OSError:  # also if the kernel refuses memfds (vm.memfd_noexec)
        return None


def _first_line(text: bytes) -> str:
    """Return the first line of a call's stderr; the rest of a crash is for its developers."""
    return one_line((text.decode(errors="replace").strip().splitlines() or [""])[0])


def _waiting(fd: int | None) -> bytes:
    """Return the content of a process's stderr pipe; empty if it has none."""
    if fd is None or not stat.S_ISFIFO(os.fstat(fd).st_mode):
        return b""
    reading = -1
    try:
        reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        return os.read(reading, _STDERR_LIMIT)
    except OSError:  # the pipe is empty, or no descriptor is free
        return b""
    finally:
        if reading >= 0:
            os.close(reading)


def last_error(path: str) -> str:
    """Return the message of the last error in a runtime's JSON log; "" if there is none.

    Args:
        path: the log file. After a crash, it may be missing, truncated or contain other text.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(_LOG_LIMIT).decode(errors="replace")
    except OSError:
        return ""
    said = ""
    end = 0
    for brace in _OBJECT.finditer(text):
        if brace.start() < end:
            continue
        try:
            entry, end = _DECODER.raw_decode(text, brace.start())
        except (ValueError, RecursionError):
            continue
        if entry.get("level") in ("error", "fatal", "panic"):  # not a set: the level may be a list
            said = str(entry.get("msg") or said)
    return said


def _console(stdio: ChildStdio) -> list[str]:
    return ["--console-socket", stdio.console_socket] if stdio.console_socket else []
