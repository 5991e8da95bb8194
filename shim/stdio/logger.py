"""Loggers: programs that take a container's output, one for each process that names one.

A logger has three descriptors besides its own three: it reads the process's stdout from 3 and
its stderr from 4, and closes 5 when it is ready. Its life::

    start ──▶ ready ──▶ reads to the end ──▶ ends by itself
      │         │                              │ or, a moment after all has been taken, is told
      │         │                              ▼ to (SIGTERM), and killed if that does not help
      │         └─▶ dies: what the process still writes is dropped, and that is said once
      └─▶ dies, or says nothing: an error, and nothing is left of it

Rules
- The operator says which programs may be loggers: those of ``[stdio] loggers`` in config.toml;
  without that, any that only root could have put there.
- That a program could be replaced by another than root is refused for every directory and link
  on the way to it, with the sticky bit too: there nobody can replace what root owns, but a
  name that is missing can be taken, and nobody keeps programs in /tmp on purpose.
- Loggers run as we do, with the environment of every program that the shim starts.
- With a list, a URI may give arguments but no environment (``env.NAME``): LD_PRELOAD and its
  kin would make any program on the list another one.
- A logger is the process that was started, and no daemon that it leaves behind. Its exit is
  nobody's exit: it is reaped, and no event tells of it.

Source: containerd core/runtime/v2/logging, cmd/containerd-shim-runc-v2/process/io.go.
"""

from __future__ import annotations

import os
import select
import signal
import stat
from typing import TYPE_CHECKING, Final

from api import aio
from shim import bundle as bundle_files
from shim.errors import LoggerFailed, LoggerNotAllowed, LoggerNotReady
from shim.programs import fixed_environment
from shim.spawn import spawn
from shim.stdio.ends import Descriptors, waiting_bytes
from shim.stdio.relay import Relay
from shim.stdio.stdio import DRAIN_SECONDS
from shim.stdio.uris import CONTAINER_ID, CONTAINER_NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shim.container import Surroundings
    from shim.log import Log
    from shim.reaper import Child
    from shim.stdio.uris import LoggerUri
    from shim.tasks import Tasks

# Seconds: to become ready; to end by itself once it has taken all; to end when told to, which
# is what containerd's own shim gives; to die.
READY_SECONDS: Final = 10.0
_OWN_END_SECONDS: Final = 2.0
_TERM_SECONDS: Final = 12.0
_DYING_SECONDS: Final = 5.0

_POLL_SECONDS: Final = 0.005
_MOST_LINKS: Final = 40

# Fields of /proc/PID/stat, counted from the one after the program's name, and a bit of one.
_FLAGS: Final = 6
_PF_EXITING: Final = 0x4
_START_TIME: Final = 19


async def start_logger(shim: Surroundings, uri: LoggerUri, process_id: str, bundle: str) -> Logger:
    """Start a logger and wait until it is ready.

    Args:
        shim: who reaps it, and where its watch runs.
        uri: which.
        process_id: whose output it takes: the container's id, or an exec's.
        bundle: the container's; it says there that it runs.

    Returns:
        The logger.

    Raises:
        LoggerNotAllowed: it is not one that the operator allows.
        LoggerFailed: it could not be executed, or has ended before it was ready.
        LoggerNotReady: it did not say in time that it is ready.
        ConfigError: the configuration is unusable.
    """
    from hooks.config import load_config  # noqa: PLC0415 - only a logger needs it here

    loggers = load_config().loggers
    program = check_program(uri.path, loggers)
    if loggers is not None and uri.variables:
        raise LoggerNotAllowed(
            f"the logger {uri.path}",
            found=f"the variable {uri.variables[0][0]} for its environment",
            do="give it arguments: with a list of loggers, their environment is not the URI's",
        )
    variables = {CONTAINER_ID: process_id, CONTAINER_NAMESPACE: shim.namespace}
    pipes = Descriptors()
    ours: list[int] = []
    try:
        for _ in range(3):
            ours += (pipes.keep(fd) for fd in os.pipe2(os.O_CLOEXEC))
        stdout, _, stderr, _, ready, says_ready = ours
        child = spawn(
            shim.reaper,
            [uri.path, *uri.arguments],
            fds={3: stdout, 4: stderr, 5: says_ready},
            program=program,
            environment={**dict(uri.variables), **fixed_environment(), **variables},
        )
    except BaseException as error:
        pipes.close()
        if isinstance(error, OSError):
            raise _failed(uri, f"it could not be started: {error.strerror}") from error
        raise
    logger = Logger(shim.tasks, shim.log, uri.path, child, ours[:4])
    os.close(says_ready)
    try:
        logger.record_in(bundle)
        await _until_ready(uri, child, ready)
    except BaseException:
        logger.kill()
        with aio.CancelScope(shield=True), aio.move_on_after(_DYING_SECONDS):
            await child.wait()
        logger.forget()
        raise
    finally:
        os.close(ready)
    logger.watch()
    return logger


def check_program(path: str, allowed: Sequence[str] | None = None) -> str:
    """Find a logger's program and see that nobody but root could have chosen it.

    Args:
        path: as the URI names it, absolute.
        allowed: the programs that may be loggers; None for all that pass.

    Returns:
        Its path without links.

    Raises:
        LoggerNotAllowed: it is not allowed; or it, or what leads to it, is not root's alone.
    """
    resolved = _resolve(path)
    if allowed is not None and resolved not in {os.path.realpath(name) for name in allowed}:
        raise LoggerNotAllowed(
            f"the logger {path}",
            found="it is not in the operator's list of loggers",
            do="add it to loggers in [stdio] of config.toml",
        )
    return resolved


class Logger:
    """A logger that runs.

    Args:
        tasks: where it is watched.
        log: told if it ends too early.
        name: its program.
        child: its process.
        pipes: the read end and the write end of its stdout, then of its stderr; ours from now on.
    """

    def __init__(
        self, tasks: Tasks, log: Log, name: str, child: Child, pipes: Sequence[int]
    ) -> None:
        self._tasks = tasks
        self._log = log
        self._name = name
        self._child = child
        self._reading = Descriptors()
        self._writing = Descriptors()
        # Ours stay open, so that no process is killed by SIGPIPE because its logger has died.
        self._sources = [self._reading.keep(fd) for fd in pipes[0::2]]
        self._sinks = [self._writing.keep(fd) for fd in pipes[1::2]]
        self._dropping: list[Relay] = []
        self._ending = False
        self._record = ""

    def record_in(self, bundle: str) -> None:
        """Leave in a bundle what is needed to end it if this process is killed."""
        start_time = int(_status(self._child.pid)[_START_TIME])
        self._record = bundle_files.record_logger(bundle, self._child.pid, start_time)

    def forget(self) -> None:
        """It has ended: remove what was left."""
        if self._record:
            bundle_files.remove(self._record)

    def take(self) -> tuple[int, int]:
        """The write ends of stdout and stderr; the taker's from now on."""
        stdout, stderr = (os.dup(fd) for fd in self._sinks)
        self._writing.close()
        return stdout, stderr

    def watch(self) -> None:
        """Say so if it ends before it was told to, and drop what it would have taken."""
        self._tasks.start_soon(self._drop_after_death)

    async def finish(self) -> None:
        """Wait until it has taken what was written, and end it; the process has ended."""
        self._ending = True
        try:
            with aio.move_on_after(DRAIN_SECONDS):
                # An exec may leave a daemon behind that keeps the pipe open: its end is not
                # waited for, only what is in it.
                while any(map(waiting_bytes, self._sources)) and self._child.exit is None:
                    await aio.sleep(_POLL_SECONDS)
            with aio.move_on_after(_OWN_END_SECONDS):
                await self._child.wait()
            self._signal(signal.SIGTERM)
            with aio.move_on_after(_TERM_SECONDS):
                await self._child.wait()
        finally:
            if self._child.exit is None:
                self._log.warning("a logger did not end, and is killed", logger=self._name)
                self._signal(signal.SIGKILL)
        with aio.move_on_after(_DYING_SECONDS):
            await self._child.wait()

    def close(self) -> None:
        """Let go of it; if it has not ended, it does so as after :meth:`finish`."""
        self._ending = True
        self._writing.close()
        for relay in self._dropping:
            relay.stop()
        if self._child.exit is None:
            self._tasks.start_soon(self._finish_and_release)
        else:
            self._stop_reading()

    def kill(self) -> None:
        """End it at once, and let go of it."""
        self._ending = True
        self._signal(signal.SIGKILL)
        self._writing.close()
        self._stop_reading()

    async def _finish_and_release(self) -> None:
        try:
            await self.finish()
        finally:
            self._stop_reading()

    def _stop_reading(self) -> None:
        # Forgotten too: their numbers are others' soon, and it may be being waited for its end.
        self._sources.clear()
        self._reading.close()

    def _signal(self, number: int) -> None:
        # Not reaped yet, so the pid is still its own.
        if self._child.exit is None:
            os.kill(self._child.pid, number)

    async def _drop_after_death(self) -> None:
        exit_ = await self._child.wait()
        self.forget()
        if self._ending or all(map(_is_at_end, self._sources)):
            return
        self._log.error(
            "a logger ended before its container: output is lost",
            logger=self._name,
            status=exit_.status,
        )
        for source in self._sources:
            try:
                relay = _drain_of(source)
            except OSError as error:
                # Not the whole pod's end for it: the container will wait when the pipe is full.
                self._log.error("output is not dropped", logger=self._name, why=str(error))
                continue
            self._dropping.append(relay)
            relay.start(self._tasks)


async def _until_ready(uri: LoggerUri, child: Child, ready: int) -> None:
    with aio.move_on_after(READY_SECONDS) as waiting:
        await aio.wait_readable(ready)
    if waiting.cancelled_caught:
        raise LoggerNotReady(
            f"the logger {uri.path}",
            found=f"it has not said within {READY_SECONDS:g} s that it is ready",
            do="let it close descriptor 5 when it is",
        )
    if os.read(ready, 1):
        return
    if child.exit is not None or _is_ending(child.pid):
        with aio.move_on_after(_DYING_SECONDS):
            await child.wait()
        status = child.exit.status if child.exit is not None else "unknown"
        raise _failed(uri, f"it ended before it was ready, with status {status}")
    if uri.speaks:
        raise _failed(uri, "it closed descriptor 5 without the byte that says that it is ready")


def _drain_of(source: int) -> Relay:
    """What drops all that comes out of a pipe."""
    ours = Descriptors()
    try:
        reading = ours.keep(os.dup(source))
        null = ours.keep(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
        return Relay(reading, null)
    except OSError:
        ours.close()
        raise


def _is_at_end(reading: int) -> bool:
    """Whether a pipe is empty and nobody can write to it any more."""
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    return [event for _, event in poll.poll(0)] == [select.POLLHUP]


def _is_ending(pid: int) -> bool:
    """Whether a child that was not reaped is a zombie, or on the way to be one."""
    fields = _status(pid)
    return fields[0] == b"Z" or bool(int(fields[_FLAGS]) & _PF_EXITING)


def _status(pid: int) -> list[bytes]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _failed(uri: LoggerUri, found: str) -> LoggerFailed:
    return LoggerFailed(
        f"the logger {uri.path}", found=found, do="run it by hand to see what it lacks"
    )


def _resolve(path: str) -> str:
    """Follow a path from / to a program, looking at each step of it."""
    directory = "/"
    _check_owner(path, directory, os.lstat(directory))
    names = path.split("/")
    links = 0
    while names:
        name = names.pop(0)
        if name in {"", "."}:
            continue
        if name == "..":
            directory = os.path.dirname(directory)
            continue
        step = os.path.join(directory, name)
        try:
            found = os.lstat(step)
            target = os.readlink(step) if stat.S_ISLNK(found.st_mode) else None
        except OSError as error:
            raise _not_allowed(path, f"{step}: {error.strerror}") from error
        _check_owner(path, step, found)
        if target is not None:
            links += 1
            if links > _MOST_LINKS:
                raise _not_allowed(path, f"{step} is one of too many links")
            directory = "/" if target.startswith("/") else directory
            names = target.split("/") + names
        elif stat.S_ISDIR(found.st_mode):
            directory = step
        else:
            if any(names):
                raise _not_allowed(path, f"{step} is no directory")
            if not stat.S_ISREG(found.st_mode) or not found.st_mode & 0o111:
                raise _not_allowed(path, f"{step} is no program")
            return step
    raise _not_allowed(path, f"{directory} is a directory")


def _check_owner(path: str, step: str, found: os.stat_result) -> None:
    if found.st_uid != 0:
        raise _not_allowed(path, f"{step} belongs to user {found.st_uid}")
    # A link's own mode means nothing.
    if not stat.S_ISLNK(found.st_mode) and found.st_mode & 0o022:
        raise _not_allowed(path, f"{step} can be written by others than its owner")


def _not_allowed(path: str, found: str) -> LoggerNotAllowed:
    return LoggerNotAllowed(
        f"the logger {path}",
        found=found,
        do="name a program that only root can change, in directories that only root can change",
    )
