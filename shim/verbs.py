"""Which verb, and what happens when one fails.

containerd reads stdout and stderr of ``start`` together, as the answer: one stray byte of a
warning would spoil it. So the first thing that ``start`` does is to point descriptor 2 at
/dev/null; it gets it back only to say one line before it fails. For the other verbs stderr is
free, and containerd logs it.

A verb ends by ``os._exit``: taking the interpreter down in good order costs 4 ms.
"""

from __future__ import annotations

import os
import sys

from api.errors import NvshimError, one_line
from shim import RUNTIME_NAME, VERSION
from shim.invocation import FORK_SERVER, parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from shim.invocation import Invocation

_STDOUT, _STDERR = 1, 2


def main(
    arguments: Sequence[str] | None = None,
    *,
    revision: str = "",
    tell: Callable[[int], None] | None = None,
    parent: int = 0,
    warm: bool = False,
) -> NoReturn:
    """Do what containerd asks, answer on stdout, and end the process.

    Args:
        arguments: the words after the program's name; None takes them from the process.
        revision: the commit that this program was built from.
        tell: told the status, if it is not by it that the process ends.
        parent: the process that asks; 0 if it is this one's parent.
        warm: whether this process has imported the server's modules already.
    """
    stderr = _STDERR
    status = 1
    asked = None
    try:
        _occupy_standard_descriptors()
        asked = parse(sys.argv[1:] if arguments is None else arguments)
        asked.parent = parent or os.getppid()
        asked.warm = warm
        if asked.verb == "start" and not (asked.info or asked.version or asked.help):
            stderr = _silence_stderr()
        _write(_STDOUT, _answer(asked, revision))
        status = 0
    except NvshimError as error:
        _say(stderr, str(error))
    except BaseException as error:  # noqa: BLE001 - no traceback may get into the answer
        _say(stderr, _describe(error))
    if tell is not None:
        if stderr != _STDERR:
            os.close(stderr)
        tell(status)
    if asked is not None and asked.afterwards is not None:
        asked.afterwards()
    os._exit(status)


def _answer(asked: Invocation, revision: str) -> bytes:
    if asked.help:
        from shim.info import USAGE  # noqa: PLC0415 - a verb loads its own module only

        return USAGE.encode()
    if asked.version:
        from shim.info import version_text  # noqa: PLC0415

        return version_text(VERSION, revision).encode()
    if asked.info:
        from shim.info import runtime_info  # noqa: PLC0415

        # containerd logs what is on stderr.
        return runtime_info(
            RUNTIME_NAME, VERSION, revision, tell=lambda line: _say(_STDERR, one_line(line))
        )
    return _verb(asked.verb)(asked)


def _verb(name: str) -> Callable[[Invocation], bytes]:
    if name == "start":
        from shim.start import start  # noqa: PLC0415

        return start
    if name == FORK_SERVER:
        return _fork_server
    from shim.delete import delete  # noqa: PLC0415

    return delete


def _fork_server(asked: Invocation) -> NoReturn:
    if not asked.socket:
        from shim.standing import stand  # noqa: PLC0415

        stand(asked.address)
    from shim.forkserver import main as fork_server  # noqa: PLC0415

    fork_server(asked.socket, asked.address, stay=asked.stay)


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

    containerd puts it in the middle of a line of its own, so a line break is added only for
    people.
    """
    try:
        _write(fd, f"{line}{os.linesep if os.isatty(fd) else ''}".encode(errors="replace"))
    except OSError:
        pass  # nobody listens; the exit status says the rest


def _describe(error: BaseException) -> str:
    """One line for what should not have happened, with the place where it did."""
    trace = error.__traceback__
    where = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        where = f" ({os.path.basename(code.co_filename)}:{trace.tb_lineno})"
        trace = trace.tb_next
    return one_line(f"containerd-shim-nvidia-v1: {type(error).__name__}: {error}{where}")
