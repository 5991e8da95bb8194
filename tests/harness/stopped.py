"""A program that is stopped at a system call, and continues when the test wants it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tests.harness.waiting import eventually


class Stopped:
    """A stopped program."""

    def __init__(self, strace: subprocess.Popen[bytes]) -> None:
        self._strace = strace

    def go_on(self) -> bytes:
        """Let it run until it exits; return its output."""
        self._continue()
        return self._strace.communicate(timeout=60)[0]

    def _continue(self) -> None:
        path = f"/proc/{self._strace.pid}/task/{self._strace.pid}/children"
        with suppress(FileNotFoundError), open(path, encoding="ascii") as file:
            for pid in file.read().split():
                os.kill(int(pid), signal.SIGCONT)


@contextmanager
def stopped_after(
    call: str, argv: Sequence[str], *, trace: str, given: bytes = b"", **popen: Any
) -> Iterator[Stopped]:
    """Run a program until its first call of a system call has returned, and stop it there.

    Args:
        trace: a file for strace to write to.
        given: its stdin.
    """
    strace = ["strace", "-qq", "-o", trace, "-e", f"inject={call}:signal=STOP:when=1"]
    with tempfile.TemporaryFile() as stdin:
        stdin.write(given)
        stdin.seek(0)
        process = subprocess.Popen([*strace, *argv], stdin=stdin, stdout=subprocess.PIPE, **popen)
    with process:
        stopped = Stopped(process)
        try:
            eventually(lambda: _is_stopped(trace), f"it is stopped after {call}")
            yield stopped
        finally:
            stopped._continue()


def _is_stopped(trace: str) -> bool:
    with suppress(FileNotFoundError), open(trace, encoding="utf-8") as file:
        return "stopped by SIGSTOP" in file.read()
    return False
