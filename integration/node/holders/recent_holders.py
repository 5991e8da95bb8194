"""Who was there a moment ago: holders of devices, and the processes that used them.

The ledger says who holds what now. The driver's errors are told later than they happen, and often
after the process that one has ended is gone, or its container. So it is remembered for a while.

Rules
- A process that used a GPU, and the first process of a container that holds one, is remembered for
  :data:`REMEMBERED` seconds after it was seen last. The kernel may give its number again: whoever
  asks has looked whether the process is still there.
- A container that has stopped, or is gone, counts among the holders for :data:`LATE` seconds more.
  One whose whole life was between two looks of the ledger is known by its bundle.
- What is remembered is bounded. For one event loop.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from integration.node.holders.values import DeviceUse, Holding, Ledger

if TYPE_CHECKING:
    from integration.containers.bundles import Container

REMEMBERED: Final = 120.0
"""Seconds that an ended process is remembered: twice the time between two scrapes of a minute."""

LATE: Final = 5.0
"""Seconds after the end of a container in which an error may still be one that it has met."""

_MOST_PIDS: Final = 4096
_MOST_HOLDINGS: Final = 1024


@dataclass(frozen=True, slots=True)
class _Gone:
    """A holding whose container has stopped, and when that was seen, in seconds since boot."""

    holding: Holding
    when: float


class RecentHolders:
    """What is remembered. All times are in seconds since boot."""

    def __init__(self) -> None:
        self._pids: OrderedDict[int, tuple[Container, float]] = OrderedDict()
        self._present: dict[str, Holding] = {}
        self._gone: OrderedDict[tuple[str, int], _Gone] = OrderedDict()
        self._is_new = True

    def saw(self, ledger: Ledger, now: float) -> None:
        """Take in who holds what now.

        Args:
            ledger: one that was just made.
        """
        present = {each.container.bundle: each for each in ledger.holdings}
        stopped = {each.container.bundle: each for each in ledger.stopped}
        for bundle, holding in self._present.items():
            pid = holding.container.pid
            if bundle not in present or pid not in {0, present[bundle].container.pid}:
                self._gone.setdefault((bundle, pid), _Gone(holding, now))
        known = {*self._present, *(bundle for bundle, _ in self._gone)}
        for bundle in stopped.keys() - known:
            # Of those that the first ledger finds stopped nobody knows since when.
            self._gone[bundle, 0] = _Gone(stopped[bundle], -math.inf if self._is_new else now)
        self._is_new = False
        # One that stopped long ago stays known as long as its bundle is there: it is not new.
        for key, each in tuple(self._gone.items()):
            if now - each.when > LATE and key[0] not in stopped:
                del self._gone[key]
        while len(self._gone) > _MOST_HOLDINGS:
            self._gone.popitem(last=False)
        self._present = present
        for holding in present.values():
            if holding.container.pid:
                self._remember(holding.container.pid, holding.container, now)
        self._bound()

    def used(self, usage: Iterable[DeviceUse], now: float) -> None:
        """Take in who uses devices now."""
        for use in usage:
            if use.holding is not None:
                for pid in use.processes:
                    self._remember(pid, use.holding.container, now)
        self._bound()

    def container_of(self, pid: int, now: float) -> Container | None:
        """The container that a process was of; None if that is not known."""
        found = self._pids.get(pid)
        if found is None:
            return None
        container, when = found
        is_there = any(each.container.pid == pid for each in self._present.values())
        return container if is_there or now - when <= REMEMBERED else None

    def holders(self, uuid: str, now: float) -> tuple[Holding, ...]:
        """Who holds a device or a part of it, or did so until :data:`LATE` seconds ago.

        Args:
            uuid: of a GPU or MIG device.
        """
        gone = (each.holding for each in self._gone.values() if now - each.when <= LATE)
        return tuple(
            each for each in (*self._present.values(), *gone) if uuid in {*each.devices, *each.gpus}
        )

    def _remember(self, pid: int, container: Container, now: float) -> None:
        self._pids[pid] = (container, now)
        self._pids.move_to_end(pid)

    def _bound(self) -> None:
        while len(self._pids) > _MOST_PIDS:
            self._pids.popitem(last=False)
