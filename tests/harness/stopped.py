"""A program that is stopped in the middle of what it does, and goes on when the test says so."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tests.harness.waiting import eventually


class Stopped:
    """The program."""

    def __init__(self, strace: subprocess.Popen[bytes]) -> None:
        self._strace = strace

    def go_on(self) -> bytes:
        """Let it go on to its end; returns what it wrote."""
        self._continue()
        return self._strace.communicate(timeout=20)[0]

    def _continue(self) -> None:
        path = f"/proc/{self._strace.pid}/task/{self._strace.pid}/children"
        with suppress(FileNotFoundError), open(path, encoding="ascii") as file:
            for pid in file.read().split():
                os.kill(int(pid), signal.SIGCONT)


@contextmanager
def stopped_after(call: str, argv: Sequence[str], *, trace: str, **popen: Any) -> Iterator[Stopped]:
    """Run a program until it has made a system call for the first time.

    Args:
        trace: a file for strace to write to.
    """
    strace = ["strace", "-qq", "-o", trace, "-e", f"inject={call}:signal=STOP:when=1"]
    with subprocess.Popen(
        [*strace, *argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, **popen
    ) as process:
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
