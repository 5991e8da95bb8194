"""Processes: their start times and descendants, killing them; our own command line.

A pid may be reused for another process at any time. So before killing a process, hold it with a
pidfd, and compare it with what is known about it (its start time).

Source: proc(5), /proc/PID/stat; pidfd_open(2), pidfd_send_signal(2).
"""

from __future__ import annotations

import os
import signal
from typing import Final

# Fields of /proc/PID/stat, counted after the name, which may contain spaces and parentheses.
_PARENT: Final = 1
_START_TIME: Final = 19
_ARG_START, _ARG_END = 45, 46


def start_time_of(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if it does not exist."""
    fields = _stat(pid)
    return int(fields[_START_TIME]) if len(fields) > _START_TIME else 0


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent; 0 if there is no such process."""
    fields = _stat(pid)
    return int(fields[_PARENT]) if fields else 0


def may_be_alive(pid: int) -> bool:
    """Whether a process with that pid exists and has not ended."""
    return pid > 0 and _stat(pid)[:1] not in ([], [b"Z"], [b"X"])  # a zombie has ended


def _stat(pid: int | str) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on; none without such a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def hold(pid: int) -> int | None:
    """Return a pidfd for a process; None if there is no process with that pid."""
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except (OSError, OverflowError):
        return None


def send_kill(pidfd: int) -> None:
    """Kill a process, unless it has ended."""
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended by itself


def kill_family(pid: int) -> None:
    """Kill an unreaped process with all its descendants.

    Args:
        pid: the process.
    """
    family = hold_descendants(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        for held in family.values():
            send_kill(held)
    finally:
        for held in family.values():
            os.close(held)


def hold_descendants(pid: int) -> dict[int, int]:
    """Return pidfds of all descendants of a process."""
    family = {child: fd for child in _descendants(pid) if (fd := hold(child)) is not None}
    for child in family.keys() - frozenset(_descendants(pid)):
        os.close(family.pop(child))  # it has ended, and another process may have its pid
    return family


def _descendants(pid: int) -> list[int]:
    """Return all descendants of a process."""
    found = [pid]
    for parent in found:  # grows during the loop
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children", "rb") as file:
                    found += [int(word) for word in file.read().split()]
        except OSError:
            continue  # it has ended
    return found[1:]


def set_command_line(words: list[str]) -> None:
    """Make ``ps`` show this process's own name, instead of its parent's.

    The kernel shows the memory of the arguments at exec, which we may overwrite.
    """
    text = b"\0".join(os.fsencode(word) for word in words)
    try:
        fields = _stat("self")
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            # Not a byte beyond: the environment follows. A zero must end it.
            memory.write(text[: end - start - 1].ljust(end - start, b"\0"))
        with open("/proc/self/comm", "wb", buffering=0) as file:
            file.write(os.fsencode(words[0]))  # the kernel keeps 15 bytes
    except (OSError, IndexError, ValueError):
        pass  # a hardened kernel forbids it; the process keeps its old name
