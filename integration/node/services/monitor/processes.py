"""Where the process was that the kernel's log names: its cgroups, while it is there.

It is looked for as soon as the log was read, since a process that met an error does not live long.

Rules
- A process that was started after the error is another with the same number.
- One that has ended and was not reaped yet is still in its cgroup of version 2, and in the root of
  every hierarchy of version 1: there it is as one that is gone.
- Of a storm, each process is looked for once in a while.

Source: cgroups(7); proc(5), starttime.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from integration.containers.cgroups import cgroups_in

if TYPE_CHECKING:
    from integration.containers.procfs import Procfs

# Seconds by which the kernel's times may differ: a process's beginning is told in hundredths.
_SLACK: Final = 1.0
# Seconds for which it is believed where a process is, and how many processes of a storm that is of.
_BELIEVED: Final = 0.5
_MOST: Final = 1024


class Processes:
    """Who looks."""

    def __init__(self, procfs: Procfs) -> None:
        self._procfs = procfs
        self._known: dict[int, tuple[float, str]] = {}

    def cgroups_of(self, pid: int, when: float) -> str:
        """What /proc/PID/cgroup has; "" if the process has ended.

        Args:
            when: the error was, in seconds since boot.
        """
        looked, cgroups = self._known.get(pid, (-_BELIEVED, ""))
        if not 0 <= when - looked <= _BELIEVED:
            if len(self._known) >= _MOST:
                self._known.clear()
            cgroups = self._look(pid, when)
            self._known[pid] = (when, cgroups)
        return cgroups

    def _look(self, pid: int, when: float) -> str:
        status = self._procfs.status(pid)
        if status is None or not status.existed_at(when, _SLACK):
            return ""
        text = self._procfs.cgroup(pid)
        if status.is_zombie:
            hierarchies = [controllers for controllers, _ in cgroups_in(text)]
            return text if hierarchies == [""] else ""
        return text
