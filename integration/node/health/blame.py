"""Which container an error is of.

Rules, the first that tells
1. The process that the kernel's log names: of the container whose id its cgroup has in its path.
   One that has ended already is looked for among those that were seen using a GPU not long ago. A
   process that was started after the error is another with the same number.
2. The only container that holds the MIG device that the error is of, or one of them.
3. The only container that holds the GPU, or a part of it.

Otherwise nobody knows. How it is known is said with it: that somebody alone holds a GPU that fell
off the bus does not make it their fault.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from integration.node.ledger.cgroups import cgroups_in, own_cgroup

if TYPE_CHECKING:
    from collections.abc import Iterable

    from integration.inspection.bundles import Container
    from integration.inspection.procfs import Procfs
    from integration.node.health.policy import Verdict
    from integration.node.ledger.values import DeviceUse, Ledger
    from integration.node.monitor.values import GpuEvent

__all__ = ["Blame", "How", "Pids", "blame"]

_MOST_PIDS: Final = 4096
# Seconds that an ended process is remembered.
_REMEMBERED: Final = 900.0
# Seconds by which the kernel's times may differ: a process's beginning is told in hundredths.
_SLACK: Final = 1.0
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class How(StrEnum):
    """How it is known whose an error is."""

    PROCESS = "by its process"
    HOLDER = "only holder"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Blame:
    """Whose an error is.

    Attributes:
        titles: the containers, as people call them; none if nobody knows.
        how: how it is known.
    """

    titles: tuple[str, ...] = ()
    how: How = How.UNKNOWN


class Pids:
    """Which processes used GPUs lately, and of which containers they were."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[str, float]] = OrderedDict()

    def remember(self, usage: Iterable[DeviceUse], now: float) -> None:
        """Remember who uses GPUs now.

        Args:
            now: in seconds since boot.
        """
        for use in usage:
            if use.holding is None:
                continue
            for pid in use.processes:
                self._known[pid] = (use.holding.container.title, now)
                self._known.move_to_end(pid)
        while len(self._known) > _MOST_PIDS:
            self._known.popitem(last=False)

    def find(self, pid: int, now: float) -> str:
        """The container that a process was of; "" if that is not known.

        Args:
            now: in seconds since boot.
        """
        title, when = self._known.get(pid, ("", 0.0))
        return title if now - when <= _REMEMBERED else ""


def blame(event: GpuEvent, verdict: Verdict, ledger: Ledger, pids: Pids, procfs: Procfs) -> Blame:
    """Whose an error is."""
    if event.pid:
        cgroups = _cgroups_of(event, procfs)
        container = _in(cgroups, (held.container for held in ledger.holdings))
        if cgroups and container is None:
            return Blame()  # it is there, and is of no container that holds a device
        title = container.title if container else pids.find(event.pid, event.when)
        if title:
            return Blame((title,), How.PROCESS)
    if not verdict.certain:
        return Blame()
    narrow = [uuid for uuid in verdict.devices if uuid != verdict.gpu]
    if verdict.gpu not in verdict.devices and (only := _only(ledger, narrow)):
        return only
    return _only(ledger, [verdict.gpu]) or Blame()


def _only(ledger: Ledger, uuids: Iterable[str]) -> Blame | None:
    """Who alone holds any of these devices; None if that is nobody, or are several."""
    holders = {held.container.title for uuid in uuids for held in ledger.holders(uuid)}
    return Blame((holders.pop(),), How.HOLDER) if len(holders) == 1 else None


def _cgroups_of(event: GpuEvent, procfs: Procfs) -> str:
    """Where the process is that an error names; "" if it has ended."""
    status = procfs.status(event.pid)
    # One that ends is in the root of every hierarchy of cgroup v1.
    if status is None or status.is_zombie or status.start_time / _TICKS > event.when + _SLACK:
        return ""
    return procfs.text(event.pid, "cgroup")


def _in(cgroups: str, containers: Iterable[Container]) -> Container | None:
    """The container that has a process, the outermost: those within are its own."""
    paths = [path for _, path in cgroups_in(cgroups)]
    found = {
        own: each for each in containers for path in paths if (own := own_cgroup(path, each.id))
    }
    return found[min(found, key=len)] if found else None
