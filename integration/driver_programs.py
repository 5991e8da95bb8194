"""Run a program that may hang in the kernel: one of the driver's, or one that waits for it.

A process that hangs there survives SIGKILL. :func:`subprocess.run` kills a process that takes too
long, and then waits without a limit. This module leaves it alone after a second, and reaps it if it
ever ends.

Ctrl-C kills the program too, also while it is being started: it would run on with the lock of NVML.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, Final

from shim.programs import has_ended

__all__ = ["kill", "run_for"]

_TO_DIE: Final = 1.0
# Processes that did not die.
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
    """Run a program and wait for it.

    Args:
        argv: the program, and its arguments.
        seconds: how long it may take; then it is killed.
        env: its whole environment.
        given: its stdin, less than a pipe holds.
        merged: put its stderr into stdout.
        pass_fds: more descriptors that it inherits.

    Raises:
        OSError: it cannot be executed.
        subprocess.TimeoutExpired: it took too long; it may still run.
    """
    _reap()
    # Files, since a process that the program leaves behind would hold a pipe open.
    with _file() as output, _file() as errors:
        process, is_done = None, False
        try:
            with _interrupt_delayed():
                process = subprocess.Popen(
                    argv, stdin=subprocess.PIPE if given else subprocess.DEVNULL,
                    stdout=output, stderr=output if merged else errors, env=env, pass_fds=pass_fds,
                )  # fmt: skip
            if process.stdin is not None:
                with suppress(BrokenPipeError), process.stdin as pipe:
                    pipe.write(given)
            is_done = _ends(process, seconds)
        finally:
            if process is not None and not is_done:
                kill(process)
        if not is_done:
            raise subprocess.TimeoutExpired(argv, seconds)
        return subprocess.CompletedProcess(argv, process.returncode, _read(output), _read(errors))


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process; if it hangs in the kernel, reap it if it ever ends."""
    _reap()
    process.kill()
    if not _ends(process, _TO_DIE):
        _left.append(process)


@contextmanager
def _interrupt_delayed() -> Iterator[None]:
    """Raise KeyboardInterrupt only at the end of the block.

    By a handler of Python, since a started program would inherit a mask, or that it is ignored.
    """
    handler = signal.default_int_handler
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not handler:
        yield
        return
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda *each: came.append(each))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:  # also if the block failed: the caller might go on
            raise KeyboardInterrupt


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
    """Wait for a process, and reap it; return whether it ended in time."""
    if process.returncode is not None:
        return True  # it was reaped before: its pid may be another process's by now
    pidfd = os.pidfd_open(process.pid)
    try:
        if not has_ended(pidfd, seconds):
            return False
    finally:
        os.close(pidfd)
    process.wait()
    return True
