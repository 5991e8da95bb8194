"""Processes, as procfs shows them: what cannot be read of one that ends is empty.

Source: proc(5).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from integration.memory import pss_and_uss
from shim.mountinfo import unescape

# Fields of /proc/PID/stat after the program's name, which may have spaces and parentheses in it.
_STATE, _PARENT, _FLAGS, _THREADS, _START_TIME, _START_STACK = 0, 1, 6, 17, 19, 25
_PF_KTHREAD: Final = 0x00200000  # include/linux/sched.h
_ACCEPTS: Final = "00010000"  # SO_ACCEPTCON: the listener, and no connection made to it
_PATH_COLUMN, _INODE_COLUMN, _FLAGS_COLUMN = 7, 6, 3


@dataclass(frozen=True, slots=True)
class Status:
    """What ``stat`` says of a process."""

    pid: int  # which
    parent: int  # the pid of its parent
    state: str  # one letter
    start_time: int  # in clock ticks since boot
    # the address where its stack begins: the same in processes that were forked from one another,
    # and random in others. 0 if it may not be known.
    stack: int
    threads: int = 1  # how many go on
    is_kernel: bool = False  # whether it is a thread of the kernel

    @property
    def is_zombie(self) -> bool:
        """Whether it has ended, and was not reaped yet; so looks one whose first thread has."""
        return self.state in {"Z", "X"} and self.threads <= 1

    @property
    def started_since_boot(self) -> float:
        """When it was started, in seconds since boot, which nobody sets; to a hundredth."""
        return self.start_time / os.sysconf("SC_CLK_TCK")

    @property
    def started(self) -> float:
        """When it was started, in seconds of the epoch."""
        boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return boot + self.started_since_boot

    @property
    def age(self) -> float:
        """Seconds since it was started."""
        return max(0.0, time.time() - self.started)


@dataclass(frozen=True, slots=True)
class Mount:
    """What is mounted somewhere."""

    device: str  # "MAJOR:MINOR" of the file system
    root: str  # which directory of that
    point: str  # where it is mounted
    kind: str  # of the file system
    source: str  # as the file system calls it
    options: tuple[str, ...]  # of the mount and of the file system


class Procfs:
    """A procfs."""

    def __init__(self, path: str = "/proc") -> None:
        self.path = path

    def pids(self) -> Iterator[int]:
        """The processes that are there."""
        yield from sorted(int(n) for n in os.listdir(self.path) if n.isdecimal() and n.isascii())

    def status(self, pid: int) -> Status | None:
        """What ``stat`` says of a process; None if it is gone."""
        fields = self.text(pid, "stat").rpartition(")")[2].split()
        if len(fields) <= _START_STACK:
            return None
        return Status(
            pid=pid,
            parent=int(fields[_PARENT]),
            state=fields[_STATE],
            start_time=int(fields[_START_TIME]),
            stack=int(fields[_START_STACK]),
            threads=int(fields[_THREADS]),
            is_kernel=bool(int(fields[_FLAGS]) & _PF_KTHREAD),
        )

    def text(self, pid: int | str, name: str) -> str:
        """A file of a process; "" if it cannot be read."""
        try:
            with open(f"{self.path}/{pid}/{name}", "rb") as file:
                return os.fsdecode(file.read())
        except OSError:
            return ""

    def words(self, pid: int) -> list[str]:
        """Its command line, without the zeros at the end of one that was overwritten."""
        line = self.text(pid, "cmdline").rstrip("\0")
        return line.split("\0") if line else []

    def link(self, pid: int, name: str) -> str:
        """Where a link of a process leads, by name; "" if it cannot be read."""
        try:
            return os.readlink(f"{self.path}/{pid}/{name}")
        except OSError:
            return ""

    def identity(self, pid: int, name: str) -> tuple[int, int] | None:
        """What a link of a process really leads to, in whatever namespace: device and inode."""
        try:
            seen = os.stat(f"{self.path}/{pid}/{name}")
        except OSError:
            return None
        return seen.st_dev, seen.st_ino

    def users(self, pid: int) -> list[int]:
        """Its real, effective, saved and file system user; none if it is gone."""
        for line in self.text(pid, "status").splitlines():
            if line.startswith("Uid:"):
                return [int(word) for word in line.split()[1:]]
        return []

    def owner(self, pid: int) -> int | None:
        """Its effective user; None if it is gone."""
        return next(iter(self.users(pid)[1:]), None)

    def descriptors(self, pid: int) -> dict[str, str]:
        """What its open files are, by number."""
        try:
            numbers = os.listdir(f"{self.path}/{pid}/fd")
        except OSError:
            return {}
        return {number: self.link(pid, f"fd/{number}") for number in numbers}

    def has_open(self, pid: int, path: str) -> bool:
        """Whether it has a file open, whatever that is called where it is."""
        try:
            file = os.stat(path)
            numbers = os.listdir(f"{self.path}/{pid}/fd")
        except OSError:  # either is gone
            return False
        wanted = (file.st_dev, file.st_ino)
        return any(self.identity(pid, f"fd/{number}") == wanted for number in numbers)

    def listening(self, pid: int) -> set[str]:
        """The paths of the unix sockets that it listens on, as it named them."""
        own = set(self.descriptors(pid).values())
        paths = set()
        for line in self.text(pid, "net/unix").splitlines():
            columns = line.split(None, _PATH_COLUMN)
            # A socket without a path has one column less.
            if len(columns) <= _PATH_COLUMN or columns[_FLAGS_COLUMN] != _ACCEPTS:
                continue
            if f"socket:[{columns[_INODE_COLUMN]}]" in own:
                paths.add(columns[_PATH_COLUMN])
        return paths

    def mapped(self, pid: int) -> list[str]:
        """The files that are mapped into its memory; one that is gone ends in " (deleted)"."""
        rows = (line.split(None, 5) for line in self.text(pid, "maps").splitlines())
        names = (row[5] for row in rows if len(row) > 5)  # noqa: PLR2004 - the last column
        return list(dict.fromkeys(name for name in names if name.startswith("/")))

    def mounts(self, pid: int | str = "self") -> list[Mount]:
        """What is mounted in its mount namespace, in the kernel's order."""
        found = []
        for line in os.fsencode(self.text(pid, "mountinfo")).splitlines():
            words = [os.fsdecode(unescape(word)) for word in line.split()]
            if "-" in words:
                end = words.index("-")
                options = {*words[5].split(","), *words[end + 3].split(",")}
                device, root, point, kind, source = *words[2:5], *words[end + 1 : end + 3]
                found.append(Mount(device, root, point, kind, source, tuple(sorted(options))))
        return found

    def memory(self, pid: int) -> tuple[int, int] | None:
        """Its part of the memory that it shares, and what it has alone; in bytes.

        None if it cannot be read.
        """
        try:
            pss, uss = pss_and_uss(pid, self.path)
        except (OSError, KeyError):  # of a process that ends it is empty
            return None
        return pss << 10, uss << 10
