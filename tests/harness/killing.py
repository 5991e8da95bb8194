"""A program that is traced: what it calls, or that it is killed at a call, which is not made."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.harness.waiting import eventually

__all__ = ["killed_at", "straced"]


@contextmanager
def killed_at(pid: int, calls: str, *, nth: int = 1) -> Iterator[None]:
    """Have a program be killed at a system call that it makes while this lasts.

    Args:
        pid: the program's.
        calls: names of system calls, with commas.
        nth: which of these calls it is, from 1.
    """
    inject = f"inject={calls}:signal=KILL:when={nth}"
    argv = ["strace", "-f", "-qqq", "-o", "/dev/null", "-e", "trace=" + calls, "-e", inject]
    with subprocess.Popen([*argv, "-p", str(pid)], stderr=subprocess.PIPE) as strace:
        try:
            eventually(lambda: _is_traced(pid), "strace has it")
            yield
        finally:
            strace.kill()  # it may wait for threads of a program that is dead


@contextmanager
def straced(pid: int, calls: str, log: Path, *, follows: bool = True) -> Iterator[None]:
    """Have strace write the system calls that a program makes while this lasts into a file.

    Args:
        pid: the program's.
        calls: names of system calls, with commas.
        log: the file; each line of it begins with a pid if others are followed.
        follows: whether its other threads and its children are traced, too.
    """
    argv = ["strace", *(["-f"] if follows else []), "-qq", "-o", str(log)]
    argv += ["-e", f"trace={calls}", "-e", "signal=none", "-p", str(pid)]
    with subprocess.Popen(argv) as strace:
        try:
            status = Path(f"/proc/{pid}/status")
            eventually(lambda: f"TracerPid:\t{strace.pid}\n" in status.read_text(), "strace has it")
            yield
        finally:
            strace.send_signal(signal.SIGINT)  # which lets go of the program


def _is_traced(pid: int) -> bool:
    """Whether each of its threads is traced by somebody, or it is dead already."""
    tasks = f"/proc/{pid}/task"
    for task in os.listdir(tasks):
        ended = suppress(FileNotFoundError, ProcessLookupError)
        with ended, open(f"{tasks}/{task}/status", encoding="ascii") as file:
            status = file.read()
            if "TracerPid:\t0\n" in status and "State:\tZ" not in status:
                return False
    return True
