"""The processes of a node by name, for programs that look for containerd, a kubelet and others.

Any process can have any name and command line, and processes in containers are visible here too.
Code that executes a process's program, or reads its files, must use :func:`host_processes` only.

Source: proc_pid_status(5), proc_pid_environ(5), mount_namespaces(7).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from integration.containers.procfs import Procfs


@dataclass(frozen=True)
class Process:
    """A process of the node."""

    pid: int
    name: str  # the kernel's short name
    procfs: Procfs  # for other facts

    @cached_property
    def words(self) -> list[str]:
        """The command line. It may contain secrets, so do not store it."""
        return self.procfs.words(self.pid)

    def option(self, *names: str) -> str:
        """Return the value of an option in its command line; "" if it is missing."""
        for word, following in pairwise((*self.words, "")):
            for name in names:
                if word == name:
                    return following
                if word.startswith(f"{name}="):
                    return word.removeprefix(f"{name}=")
        return ""

    def search_path(self) -> tuple[str, ...]:
        """Return the directories in which it looks for programs; empty if unreadable."""
        return tuple(filter(None, self.procfs.variable(self.pid, "PATH").split(":")))


def node_processes(proc: str = "/proc") -> Iterator[Process]:
    """Yield all processes in the order of their pids."""
    procfs = Procfs(proc)
    for pid in procfs.pids() if os.path.isdir(proc) else ():
        if name := procfs.name(pid):  # otherwise it has ended
            yield Process(pid, name, procfs)


def host_processes(proc: str = "/proc") -> Iterator[Process]:
    """Yield the processes that run as root alone, in the node's or our mount namespace."""
    return (each for each in node_processes(proc) if each.procfs.is_own(each.pid, is_roots=True))
