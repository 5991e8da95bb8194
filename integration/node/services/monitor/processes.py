"""Read the cgroups of a process that the kernel log names.

The agent reads them right after the log line, because a process with a GPU error soon exits.

Rules
- A process that started after the error is another one with the same PID.
- A zombie is still in its cgroup v2, but in every v1 hierarchy it is in the root. On a v1 node it
  counts as exited.
- In a storm, the answer for a process is cached for a moment.

Source: cgroups(7); proc(5), starttime.
"""

from __future__ import annotations

from typing import Final

from integration.containers.cgroups import cgroups_in
from integration.containers.procfs import Procfs

# Seconds by which the kernel's times may differ: it gives start times in hundredths of a second.
_SLACK: Final = 1.0
# Seconds for which an answer is cached, and the number of cached processes.
_CACHED: Final = 0.5
_MOST: Final = 1024


class Processes:
    """Reads and caches the cgroups of processes."""

    def __init__(self, procfs: Procfs) -> None:
        self._procfs = procfs
        self._known: dict[int, tuple[float, str]] = {}

    def cgroups_of(self, pid: int, when: float) -> str:
        """Return the text of /proc/PID/cgroup; "" if the process has exited.

        Args:
            pid: in the node's PID namespace.
            when: the time of the error, in seconds since boot.
        """
        read_at, cgroups = self._known.get(pid, (-_CACHED, ""))
        if not 0 <= when - read_at <= _CACHED:
            if len(self._known) >= _MOST:
                self._known.clear()
            cgroups = self._read(pid, when)
            self._known[pid] = (when, cgroups)
        return cgroups

    def _read(self, pid: int, when: float) -> str:
        status = self._procfs.status(pid)
        if status is None or not status.existed_at(when, _SLACK):
            return ""
        text = self._procfs.cgroup(pid)
        if status.is_zombie:
            hierarchies = [controllers for controllers, _ in cgroups_in(text)]
            return text if hierarchies == [""] else ""
        return text
