"""Running a program of the driver's, or one that waits for it: both may hang in the kernel.

No signal reaches a process there. :func:`subprocess.run` kills one that takes too long, and then
waits for its end without a limit. Here it is left alone a second later, and reaped if it ever ends.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Final

from shim.programs import has_ended

__all__ = ["kill", "run_for"]

_TO_DIE: Final = 1.0
# What was left alone.
_left: Final[list[subprocess.Popen[bytes]]] = []


def run_for(
    argv: Sequence[str],
    seconds: float,
    *,
    env: Mapping[str, str],
    given: bytes = b"",
    merged: bool = False,
    pass_fds: Sequence[int] = (),
) -> subprocess.CompletedProcess[bytes]:
    """Run a program until it has ended.

    Args:
        argv: the program, and its arguments.
        seconds: that it may take; then it is killed.
        env: the whole of its environment.
        given: what it reads from stdin, less than a pipe holds.
        merged: whether what it writes to stderr is told with the rest.
        pass_fds: descriptors that it has besides.

    Raises:
        OSError: it cannot be executed.
        subprocess.TimeoutExpired: its time was up; it may not have ended.
    """
    _reap()
    # Files, since a pipe is held open by whatever the program leaves behind.
    with _file() as output, _file() as errors:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE if given else subprocess.DEVNULL,
            stdout=output, stderr=output if merged else errors, env=env, pass_fds=pass_fds,
        )  # fmt: skip
        is_done = False
        try:
            if process.stdin is not None:
                with suppress(BrokenPipeError), process.stdin as pipe:
                    pipe.write(given)
            is_done = _ends(process, seconds)
        finally:
            if not is_done:
                kill(process)
        if not is_done:
            raise subprocess.TimeoutExpired(argv, seconds)
        return subprocess.CompletedProcess(argv, process.returncode, _read(output), _read(errors))


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that may hang in the kernel; one that does is reaped if it ever ends."""
    _reap()
    process.kill()
    if not _ends(process, _TO_DIE):
        _left.append(process)


def _reap() -> None:
    for each in tuple(_left):
        if each.poll() is not None:
            with suppress(ValueError):  # another thread was faster
                _left.remove(each)


def _file() -> IO[bytes]:
    return open(os.memfd_create("output"), "w+b")


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _ends(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether it ends in time; then it is reaped."""
    if process.returncode is not None:
        return True  # it was seen when it was to be killed, and its number may be another's by now
    pidfd = os.pidfd_open(process.pid)
    try:
        if not has_ended(pidfd, seconds):
            return False
    finally:
        os.close(pidfd)
    process.wait()
    return True
