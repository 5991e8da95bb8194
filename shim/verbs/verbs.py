"""Choose and execute the verb, and handle its failure.

containerd reads stdout and stderr of ``start`` together as the answer, which a stray byte of a
warning would spoil. So ``start`` first points descriptor 2 at /dev/null, and restores it only to
write one line before it fails. For the other verbs, containerd logs stderr.

A verb ends with ``os._exit``: an orderly exit of the interpreter costs 4 ms.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from api.errors import NvshimError, one_line
from shim import RUNTIME_NAME, VERSION
from shim.verbs import warmstart
from shim.verbs.delete import delete
from shim.verbs.info import USAGE, runtime_info, version_text
from shim.verbs.invocation import Invocation, parse
from shim.verbs.start import start

_STDOUT, _STDERR = 1, 2


class WarmCaller(NamedTuple):
    """The client of a process from the fork server that executes a verb."""

    parent: int  # the pid of the client's parent: containerd
    # the connection to the process that waits to become the shim, if any
    waiting: socket.socket | None
    tell: Callable[[int], None]  # sends the verb's status to the client


def main(
    arguments: Sequence[str], *, revision: str = "", caller: WarmCaller | None = None
) -> NoReturn:
    """Execute containerd's request, answer on stdout, and exit.

    Args:
        arguments: the words after the program's name.
        revision: the commit of the build.
        caller: the client of the fork server; None in a process that containerd executed.
    """
    stderr = _STDERR
    status = 1
    try:
        _occupy_standard_descriptors()
        asked = parse(arguments)
        if asked.verb == "start":
            stderr = _silence_stderr()
        _write(_STDOUT, _answer(asked, revision, caller))
        status = 0
    except NvshimError as error:
        _say(stderr, str(error))
    except BaseException as error:  # noqa: BLE001 - no traceback may get into the answer
        _say(stderr, _describe(error))
    if caller is not None:
        if stderr != _STDERR:
            os.close(stderr)
        caller.tell(status)
    os._exit(status)


def _answer(asked: Invocation, revision: str, caller: WarmCaller | None) -> bytes:
    if asked.help:
        return USAGE.encode()
    if asked.version:
        return version_text(VERSION, revision).encode()
    if asked.info:
        # containerd logs stderr.
        return runtime_info(
            RUNTIME_NAME, VERSION, revision, tell=lambda line: _say(_STDERR, one_line(line))
        )
    if asked.verb == "delete":
        return delete(asked)
    if caller is not None:
        return start(asked, parent=caller.parent, waiting=caller.waiting)
    answer = start(asked, parent=os.getppid())
    warmstart.leave_behind(asked.address)
    return answer


def _occupy_standard_descriptors() -> None:
    """Open those of 0, 1 and 2 that are closed, so that none of our files takes their place."""
    while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= _STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)


def _silence_stderr() -> int:
    """Point descriptor 2 at /dev/null, and return a duplicate of the old one."""
    kept = os.dup(_STDERR)
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(null, _STDERR)
    os.close(null)
    return kept


def _write(fd: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _say(fd: int, line: str) -> None:
    """Write the line that explains the verb's failure.

    containerd puts it in the middle of its own line, so only human readers get a line break.
    """
    try:
        _write(fd, f"{line}{os.linesep if os.isatty(fd) else ''}".encode(errors="replace"))
    except OSError:
        pass  # no reader; the exit status must do


def _describe(error: BaseException) -> str:
    """Return a line about an unexpected error, with its place in the code."""
    trace = error.__traceback__
    where = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        where = f" ({os.path.basename(code.co_filename)}:{trace.tb_lineno})"
        trace = trace.tb_next
    return one_line(f"containerd-shim-nvidia-v1: {type(error).__name__}: {error}{where}")
