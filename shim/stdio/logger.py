"""Loggers: programs that read a container's output, one for each process whose URI names one.

A logger has three additional descriptors: it reads the process's stdout from 3 and its stderr from
4, and closes 5 when it is ready. Its life::

    start ──▶ ready ──▶ reads to the end ──▶ ends by itself, or a moment after it has read all
      │         │                            gets SIGTERM, and then SIGKILL
      │         └─▶ dies: what the process still writes is dropped, and that is logged once
      └─▶ dies, or does not become ready: an error, and nothing is left of it

Rules
- The operator allows loggers in ``[stdio] loggers`` of config.toml. Without that list, any program
  that only root can replace is allowed.
- A program is refused if another user could replace it, or any directory or link on its path. A
  directory with the sticky bit is refused too: other users cannot replace root's files there, but
  can create missing ones, and programs do not belong in /tmp.
- Loggers run as the shim's user, with the environment of every program that it starts.
- The arguments from a URI are each key and its first value, even if that is empty, in the order of
  the URI. (Go loses the order, but keeps a key and its value together.) A key ``env.NAME`` is not
  an argument but a variable of the logger's environment.
- With a list, a URI may contain arguments but no environment (``env.NAME``): LD_PRELOAD and similar
  variables could turn any program on the list into another one.
- A logger is the started process, not a daemon that it leaves behind. Its exit is reaped, but not
  published as an event.

Source: containerd core/runtime/v2/logging, cmd/containerd-shim-runc-v2/process/io.go, io_util.go;
net/url ParseQuery.
"""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Sequence
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from api.values import dataclass
from hooks.config import load_config
from shim import bundle as bundle_files
from shim import files, loop
from shim.children import Child, spawn
from shim.context import ShimContext
from shim.errors import (
    InvalidLogUri,
    LoggerFailed,
    LoggerNotAllowed,
    LoggerNotReady,
    ShimError,
    remedy_of,
)
from shim.programs import fixed_environment
from shim.stdio.files import ProcessOutput
from shim.stdio.pipes import Descriptors, waiting_bytes
from shim.stdio.streams import DRAIN_SECONDS, Output

# Seconds for a logger to become ready; to exit after it has read everything; to exit after SIGTERM,
# as in containerd's own shim; to die of SIGKILL.
READY_SECONDS: Final = 10.0
_OWN_END_SECONDS: Final = 2.0
_TERM_SECONDS: Final = 12.0
_DYING_SECONDS: Final = 5.0

# The variables that the shim itself sets, and a URI cannot change.
_CONTAINER_ID: Final = "CONTAINER_ID"
_CONTAINER_NAMESPACE: Final = "CONTAINER_NAMESPACE"
_VARIABLE: Final = "env."

_POLL_SECONDS: Final = 0.005
_MOST_LINKS: Final = 40

# Fields of /proc/PID/stat, counted after the program's name, and a bit of one.
_FLAGS: Final = 6
_PF_EXITING: Final = 0x4
_START_TIME: Final = 19


@dataclass(frozen=True, slots=True)
class LoggerUri:
    """A program that reads output."""

    path: str  # the program, absolute
    arguments: tuple[str, ...]  # its arguments, without its name
    variables: tuple[tuple[str, str], ...]  # additions to its environment: names and values
    # whether it writes a byte when ready (binary-v2), instead of only closing the descriptor
    speaks: bool


def parse_logger(uri: str, *, speaks: bool) -> LoggerUri:
    """Parse a logger's URI.

    Raises:
        InvalidLogUri: it is malformed.
    """
    try:
        parts = urlsplit(uri)
        pairs = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError as error:
        raise _invalid(uri, str(error)) from error
    path = unquote(parts.path)
    if parts.netloc or not path.startswith("/"):
        raise _invalid(uri, "not an absolute path")
    first: dict[str, str] = {}
    for key, value in pairs:
        first.setdefault(key, value)
    if any("\0" in text for text in (path, *first, *first.values())):
        raise _invalid(uri, "a zero byte")
    arguments: list[str] = []
    variables: list[tuple[str, str]] = []
    for key, value in first.items():
        name = key.removeprefix(_VARIABLE)
        if name == key:
            arguments += [key, value]
        elif not name or "=" in name:
            raise _invalid(uri, f"a variable of the name {name!r}")
        elif name not in {_CONTAINER_ID, _CONTAINER_NAMESPACE}:
            variables.append((name, value))
    return LoggerUri(path, tuple(arguments), tuple(variables), speaks)


def _invalid(uri: str, found: str) -> ShimError:
    return InvalidLogUri(
        f"a logger at {uri!r}",
        found=found,
        do="write binary:///absolute/path?key=value&key=value",
    )


async def start_logger(
    shim: ShimContext, uri: LoggerUri, process_id: str, bundle: str
) -> tuple[Logger, Output]:
    """Start a logger and wait until it is ready.

    Args:
        shim: reaps and watches the logger.
        uri: the logger's URI.
        process_id: the process whose output it reads: the container's id, or an exec's.
        bundle: the container's bundle, which records the logger.

    Returns:
        The logger, as stdout, and its stderr.

    Raises:
        LoggerNotAllowed: the operator does not allow it.
        LoggerFailed: it cannot be executed, or ended before it was ready.
        LoggerNotReady: it was not ready in time.
        ConfigError: the configuration is unusable.
    """
    loggers = load_config().loggers
    program = check_program(uri.path, loggers)
    if loggers is not None and uri.variables:
        raise LoggerNotAllowed(
            f"the logger {uri.path}",
            found=f"the variable {uri.variables[0][0]} for its environment",
            do="give it arguments: with a list of loggers, their environment is not the URI's",
        )
    variables = {_CONTAINER_ID: process_id, _CONTAINER_NAMESPACE: shim.namespace}
    pipes = Descriptors()
    fds: list[int] = []
    try:
        for _ in range(3):
            fds += (pipes.keep(fd) for fd in os.pipe2(os.O_CLOEXEC))
        stdout, to_stdout, stderr, to_stderr, ready, says_ready = fds
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
            raise _failed(uri, f"it could not be started: {error.strerror}", error) from error
        raise
    os.close(says_ready)
    logger = Logger(shim, uri.path, child, to_stdout, [stdout, stderr])
    second = Output(to_stderr)
    try:
        logger.record_in(bundle)
        await _until_ready(uri, child, ready)
    except BaseException:
        logger.discard()
        second.close()
        with loop.CancelScope(shield=True), loop.move_on_after(_DYING_SECONDS):
            await child.wait()
        logger.forget()
        raise
    finally:
        os.close(ready)
    logger.watch()
    return logger, second


def check_program(path: str, allowed: Sequence[str] | None = None) -> str:
    """Find a logger's program, and check that only root could have put it there.

    Args:
        path: the absolute path from the URI.
        allowed: the allowed loggers; None for any.

    Returns:
        The program's path without links.

    Raises:
        LoggerNotAllowed: it is not in the list, or another user can change it or its path.
    """
    resolved = _resolve(path)
    if allowed is not None and resolved not in {os.path.realpath(name) for name in allowed}:
        raise LoggerNotAllowed(
            f"the logger {path}",
            found="it is not in the operator's list of loggers",
            do="add it to loggers in [stdio] of config.toml",
        )
    return resolved


class Logger(ProcessOutput):
    """A running logger, as the output that it reads as stdout."""

    lost = "a logger ended before its container: output is lost"
    _record = ""

    def record_in(self, bundle: str) -> None:
        """Record it in a bundle, for the ``delete`` verb if this process is killed."""
        start_time = int(_status(self._child.pid)[_START_TIME])
        self._record = bundle_files.record_logger(bundle, self._child.pid, start_time)

    def forget(self) -> None:
        """Remove the record once the logger has ended."""
        if self._record:
            files.remove(self._record)

    async def drain(self, deadline: float) -> None:
        """Wait until it has read all output, and end it."""
        await super().drain(deadline)
        await self._end(deadline)

    def close(self) -> None:
        """Release our descriptors; a running logger ends as after :meth:`drain`."""
        super().close()
        if self._child.exit is None:
            self._shim.tasks.start_soon(self._end_and_release)
        else:
            self._stop_reading()

    async def _end(self, deadline: float) -> None:
        try:
            with loop.CancelScope(deadline=deadline):
                # Do not wait for the end of the pipe: a daemon of an exec may keep it open.
                while any(map(waiting_bytes, self._sources)) and self._child.exit is None:
                    await loop.sleep(_POLL_SECONDS)
            with loop.move_on_after(_OWN_END_SECONDS):
                await self._child.wait()
            self._child.signal(signal.SIGTERM)
            with loop.move_on_after(_TERM_SECONDS):
                await self._child.wait()
        finally:
            if self._child.exit is None:
                self._shim.log.warning("a logger did not end, and is killed", logger=self._name)
                self._child.kill()
        with loop.move_on_after(_DYING_SECONDS):
            await self._child.wait()
            self.forget()  # before answering the waiting client

    async def _end_and_release(self) -> None:
        try:
            await self._end(loop.current_time() + DRAIN_SECONDS)
        finally:
            self._stop_reading()


async def _until_ready(uri: LoggerUri, child: Child, ready: int) -> None:
    with loop.move_on_after(READY_SECONDS) as waiting:
        await loop.wait_readable(ready)
    if waiting.cancelled_caught:
        raise LoggerNotReady(
            f"the logger {uri.path}",
            found=f"it did not report within {READY_SECONDS:g} s that it is ready",
            do="let it close descriptor 5 when it is",
        )
    if os.read(ready, 1):
        return
    if child.exit is not None or _is_ending(child.pid):
        with loop.move_on_after(_DYING_SECONDS):
            await child.wait()
        status = child.exit.status if child.exit is not None else "unknown"
        raise _failed(uri, f"it ended before it was ready, with status {status}")
    if uri.speaks:
        raise _failed(uri, "it closed descriptor 5 without the byte that reports that it is ready")


def _is_ending(pid: int) -> bool:
    """Whether an unreaped child is a zombie, or about to become one."""
    fields = _status(pid)
    return fields[0] == b"Z" or bool(int(fields[_FLAGS]) & _PF_EXITING)


def _status(pid: int) -> list[bytes]:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _failed(uri: LoggerUri, found: str, error: OSError | None = None) -> ShimError:
    failed = LoggerFailed(
        f"the logger {uri.path}", found=found, do="run it by hand to see what it lacks"
    )
    if error is not None:
        failed.do = remedy_of(error, failed.do)
    return failed


def _resolve(path: str) -> str:
    """Follow a path from / to a program, and check each step."""
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
                raise _not_allowed(path, f"{step} is not a directory")
            if not stat.S_ISREG(found.st_mode) or not found.st_mode & 0o111:
                raise _not_allowed(path, f"{step} is not a program")
            return step
    raise _not_allowed(path, f"{directory} is a directory")


def _check_owner(path: str, step: str, found: os.stat_result) -> None:
    if found.st_uid != 0:
        raise _not_allowed(path, f"{step} belongs to user {found.st_uid}")
    # A link's own mode is meaningless.
    if not stat.S_ISLNK(found.st_mode) and found.st_mode & 0o022:
        raise _not_allowed(path, f"{step} can be written by others than its owner")


def _not_allowed(path: str, found: str) -> ShimError:
    return LoggerNotAllowed(
        f"the logger {path}",
        found=found,
        do="name a program that only root can change, in directories that only root can change",
    )
