"""Trace a program with strace: log its system calls, or kill it before one."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.harness.waiting import eventually

__all__ = ["killed_at", "killed_before", "straced"]

# Each other call with one of the names takes as long.
_DELAY: Final = "2s"


@contextmanager
def killed_at(pid: int, calls: str, *, nth: int = 1) -> Iterator[None]:
    """Kill a program at a system call that it makes inside the block.

    Args:
        pid: the program's pid.
        calls: names of system calls, separated by commas.
        nth: at which of these calls to kill it, counted from 1. Each thread counts by itself.
    """
    inject = f"inject={calls}:signal=KILL:when={nth}"
    argv = ["strace", "-f", "-qqq", "-o", "/dev/null", "-e", "trace=" + calls, "-e", inject]
    with subprocess.Popen([*argv, "-p", str(pid)], stderr=subprocess.PIPE) as strace:
        try:
            eventually(lambda: _is_traced(pid), "strace has it")
            yield
        finally:
            strace.kill()  # it may wait for threads of a dead program


@contextmanager
def killed_before(pid: int, calls: str, path: str) -> Iterator[None]:
    """Kill a program before a system call with a certain path, whichever thread makes it.

    Args:
        pid: the program's pid.
        calls: names of system calls, separated by commas.
        path: the path.
    """
    # strace 6.1 does not compare its -P with both paths of rename(2). But it writes the arguments
    # before it delays a call, which is long enough to read them.
    delay = f"inject={calls}:delay_enter={_DELAY}"
    argv = ["strace", "-f", "-qqq", "-e", "trace=" + calls, "-e", delay, "-p", str(pid)]
    with subprocess.Popen(argv, stderr=subprocess.PIPE) as strace:
        reader = threading.Thread(target=_kill_at, args=(pid, strace, f'"{path}"'.encode()))
        reader.start()
        try:
            eventually(lambda: _is_traced(pid), "strace has it")
            yield
        finally:
            strace.kill()  # it may wait for threads of a dead program
            reader.join()


def _kill_at(pid: int, strace: subprocess.Popen[bytes], word: bytes) -> None:
    read = b""
    assert strace.stderr is not None
    while chunk := os.read(strace.stderr.fileno(), 1 << 16):
        read += chunk
        if word in read:
            os.kill(pid, signal.SIGKILL)
            strace.kill()  # it would hold the dead program until the end of the delay
            return


@contextmanager
def straced(pid: int, calls: str, log: Path, *, follows: bool = True) -> Iterator[None]:
    """Let strace log the system calls that a program makes inside the block.

    Args:
        pid: the program's pid.
        calls: names of system calls, separated by commas.
        log: the log file. With ``follows``, each of its lines starts with a pid.
        follows: whether to trace its other threads and its children, too.
    """
    argv = ["strace", *(["-f"] if follows else []), "-qq", "-o", str(log)]
    argv += ["-e", f"trace={calls}", "-e", "signal=none", "-p", str(pid)]
    with subprocess.Popen(argv) as strace:
        try:
            status = Path(f"/proc/{pid}/status")
            eventually(lambda: f"TracerPid:\t{strace.pid}\n" in status.read_text(), "strace has it")
            yield
        finally:
            strace.send_signal(signal.SIGINT)  # detaches from the program


def _is_traced(pid: int) -> bool:
    """Return whether all of its threads are traced, or it is already dead."""
    tasks = f"/proc/{pid}/task"
    for task in os.listdir(tasks):
        ended = suppress(FileNotFoundError, ProcessLookupError)
        with ended, open(f"{tasks}/{task}/status", encoding="ascii") as file:
            status = file.read()
            if "TracerPid:\t0\n" in status and "State:\tZ" not in status:
                return False
    return True
