"""Remember the recent holders of devices, and the processes that used them.

The ledger has only the present holders. The driver reports an error late, often when the process or
the container that it killed no longer exists. So both are remembered for a while.

Rules
- A process that used a GPU, and the first process of a container that holds one, is remembered for
  :data:`REMEMBERED` seconds after it was last seen. The kernel may reuse its id, so the caller
  first checks that the process has exited.
- A container that has stopped or was deleted still counts as a holder for :data:`LATE` seconds. A
  container that started and stopped between two ledgers is known by its bundle.
- The memory is bounded. Use it from one event loop only.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from api.values import dataclass
from integration.containers.bundles import Container
from integration.node.holders.values import DeviceUse, Holding, Ledger

REMEMBERED: Final = 120.0
"""Seconds that an exited process is remembered: twice a scrape interval of one minute."""

LATE: Final = 5.0
"""Seconds after a container's exit in which an error may still concern it."""

_MOST_PIDS: Final = 4096
_MOST_HOLDINGS: Final = 1024


@dataclass(frozen=True, slots=True)
class _Gone:
    """A holding whose container has stopped."""

    holding: Holding
    when: float  # when the ledger first showed it stopped, in seconds since boot


class RecentHolders:
    """The recent holders and processes. All times are in seconds since boot."""

    def __init__(self) -> None:
        self._pids: OrderedDict[int, tuple[Container, float]] = OrderedDict()
        self._present: dict[str, Holding] = {}
        self._gone: OrderedDict[tuple[str, int], _Gone] = OrderedDict()
        self._is_new = True

    def saw(self, ledger: Ledger, now: float) -> None:
        """Update the holders from a new ledger."""
        present = {each.container.bundle: each for each in ledger.holdings}
        stopped = {each.container.bundle: each for each in ledger.stopped}
        for bundle, holding in self._present.items():
            pid = holding.container.pid
            if bundle not in present or pid not in {0, present[bundle].container.pid}:
                self._gone.setdefault((bundle, pid), _Gone(holding, now))
        known = {*self._present, *(bundle for bundle, _ in self._gone)}
        for bundle in stopped.keys() - known:
            # The first ledger does not say when its stopped containers stopped.
            self._gone[bundle, 0] = _Gone(stopped[bundle], -math.inf if self._is_new else now)
        self._is_new = False
        # Keep an old entry while its bundle exists: otherwise the next ledger would add it again.
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
        """Update the processes from a new measurement of use."""
        for use in usage:
            if use.holding is not None:
                for pid in use.processes:
                    self._remember(pid, use.holding.container, now)
        self._bound()

    def container_of(self, pid: int, now: float) -> Container | None:
        """Return the container the process ran in; None if unknown."""
        known = self._pids.get(pid)
        if known is None:
            return None
        container, when = known
        is_running = any(each.container.pid == pid for each in self._present.values())
        return container if is_running or now - when <= REMEMBERED else None

    def holders(self, uuid: str, now: float) -> tuple[Holding, ...]:
        """Return the holders of a device or a part of it, now and in the last few seconds.

        Args:
            uuid: the UUID of a GPU or MIG device.
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
