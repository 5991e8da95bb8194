"""A program that is killed as it makes a system call, which is not made then."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.harness.waiting import eventually

__all__ = ["killed_at"]


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
