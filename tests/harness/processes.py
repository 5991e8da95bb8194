"""Processes of the machine: descendants, memory, CPU time, open sockets, and stopping a daemon."""

from __future__ import annotations

import os
from contextlib import suppress
from subprocess import Popen, TimeoutExpired
from typing import Any, Final

from integration.timeouts import PATIENCE

_TICK: Final = os.sysconf("SC_CLK_TCK")
_CONNECTED: Final = "03"


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for each in found:
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{each}/task"):
                with open(f"/proc/{each}/task/{thread}/children", encoding="ascii") as file:
                    found += [int(number) for number in file.read().split()]
    return found


def with_nvml(pid: int) -> list[int]:
    """Return those of a process and its descendants that have NVML's library loaded."""
    found = []
    for each in family(pid):
        with suppress(OSError), open(f"/proc/{each}/maps", encoding="utf-8") as file:
            if "libnvidia-ml" in file.read():
                found.append(each)
    return found


def sockets_of(pid: int) -> list[str]:
    """Return the inodes of a process's open sockets; none once it has exited."""
    found = []
    with suppress(FileNotFoundError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # it was closed meanwhile
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                found.append(target.removeprefix("socket:[")[:-1])
    return found


def connections_to(path: str) -> set[str]:
    """Return the inodes of a listening socket's connections, at the server's end."""
    with open("/proc/net/unix", encoding="ascii") as file:
        words = [line.split() for line in file if line.endswith(f" {path}\n")]
    return {number for *_, state, number, _ in words if state == _CONNECTED}


def processor_time(pid: int) -> float:
    """Return the CPU time of a process in seconds."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        words = file.read().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / _TICK


def rss_and_pss(pid: int) -> tuple[int, int]:
    """Return the RSS and the PSS of a process in KiB."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        table = dict(line.split()[:2] for line in file.readlines()[1:])
    return int(table["Rss:"]), int(table["Pss:"])


def end(process: Popen[Any], *, timeout: float = 10) -> None:
    """Stop a daemon as a service manager does: SIGTERM, then SIGKILL after a timeout."""
    process.terminate()
    try:
        process.wait(timeout * PATIENCE)
    except TimeoutExpired:
        process.kill()
        process.wait()
