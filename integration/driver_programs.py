"""Run a program that may hang in the kernel: one of the driver's, or one that waits for the driver.

A process that hangs in the kernel survives SIGKILL. :func:`subprocess.run` kills a process that
takes too long, and then waits for it without a limit. This module stops waiting after a second, and
reaps the process if it ever ends.

Ctrl-C kills the program too, even while it is being started. Otherwise it would keep running with
the lock of NVML.
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
        seconds: the time limit, after which the program is killed.
        env: the complete environment.
        given: the data for its stdin, which must fit into a pipe.
        merged: put its stderr into stdout.
        pass_fds: more descriptors to inherit.

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

    A handler in Python delays the signal. A signal mask, or SIG_IGN, would be inherited by a
    started program.
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
        if came:  # also if the block failed: the caller might continue
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
