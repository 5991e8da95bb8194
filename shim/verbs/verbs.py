"""Choose the verb to do, and handle its failure.

containerd reads stdout and stderr of ``start`` together as the answer, which a single stray byte of
a warning would spoil. So the first thing that ``start`` does is to point descriptor 2 at /dev/null;
it restores it only to write one line before it fails. For the other verbs stderr is free, and
containerd logs it.

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
    """The client that has a verb done by a process forked from the fork server."""

    parent: int  # the pid of the client's parent: containerd
    # to the process that waits to become the shim; None if there is none
    waiting: socket.socket | None
    tell: Callable[[int], None]  # sends the client the verb's status


def main(
    arguments: Sequence[str], *, revision: str = "", caller: WarmCaller | None = None
) -> NoReturn:
    """Do what containerd asks, answer on stdout, and exit.

    Args:
        arguments: the words after the program's name.
        revision: the commit that this program was built from.
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
        # containerd logs what is on stderr.
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
    """Open what of 0, 1 and 2 is closed, so that no file of ours takes their place."""
    while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= _STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)


def _silence_stderr() -> int:
    """Point descriptor 2 at /dev/null, and return a duplicate of what it was."""
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
    """Write the line that tells why the verb failed.

    containerd puts it in the middle of a line of its own, so a line break is added only for human
    readers.
    """
    try:
        _write(fd, f"{line}{os.linesep if os.isatty(fd) else ''}".encode(errors="replace"))
    except OSError:
        pass  # there is no reader; the exit status says the rest


def _describe(error: BaseException) -> str:
    """Return a line about an unexpected error, with the place where it happened."""
    trace = error.__traceback__
    where = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        where = f" ({os.path.basename(code.co_filename)}:{trace.tb_lineno})"
        trace = trace.tb_next
    return one_line(f"containerd-shim-nvidia-v1: {type(error).__name__}: {error}{where}")
