"""Which container an error is of.

Rules, the first that tells
1. The process that the kernel's log names: of the container whose id its cgroup has in its path.
   That was read when the log was (:mod:`integration.node.services.monitor.processes`). One that had
   ended by then is looked for among those that were seen not long ago
   (:mod:`integration.node.holders.recent_holders`).
2. The only container that holds the MIG device that the error is of, or one of them.
3. The only container that holds the GPU, or a part of it.

Who held a device until a moment ago counts as a holder: errors are told late. Otherwise nobody
knows. How it is known is said with it: that somebody alone holds a GPU that fell off the bus does
not make it their fault.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from integration.containers.cgroups import cgroups_in, own_cgroup
from integration.node.holders.recent_holders import Lately
from integration.node.holders.values import Ledger

if TYPE_CHECKING:
    from integration.containers.bundles import Container
    from integration.node.faults.policy import Verdict
    from integration.nvml.values import GpuEvent


class How(StrEnum):
    """How it is known whose an error is."""

    PROCESS = "by its process"
    ENDED = "by its process, which has ended"
    HOLDER = "only holder"
    OUTSIDE = "by a process that is in no container"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Blame:
    """Whose an error is."""

    container: Container | None = None  # whose; None if it is nobody's, or nobody knows
    how: How = How.UNKNOWN  # how it is known

    @property
    def titles(self) -> tuple[str, ...]:
        """What people call it; none if nobody knows."""
        return () if self.container is None else (self.container.title,)


def blame(event: GpuEvent, verdict: Verdict, ledger: Ledger, lately: Lately) -> Blame:
    """Whose an error is."""
    if event.pid:
        if event.cgroups:
            holders = [each.container for each in (*ledger.holdings, *ledger.stopped)]
            container = _in(event.cgroups, (*holders, *ledger.containers))
            return Blame(container, How.PROCESS) if container else Blame(None, How.OUTSIDE)
        container = lately.container_of(event.pid, event.when)
        if container is not None:
            return Blame(container, How.ENDED)
    if not verdict.certain:
        return Blame()
    narrow = [uuid for uuid in verdict.devices if uuid != verdict.gpu]
    if verdict.gpu not in verdict.devices and (only := _only(lately, narrow, event.when)):
        return only
    return _only(lately, [verdict.gpu], event.when) or Blame()


def _only(lately: Lately, uuids: Iterable[str], when: float) -> Blame | None:
    """Who alone holds any of these devices; None if that is nobody, or are several."""
    found = {
        held.container.bundle: held.container
        for uuid in uuids
        for held in lately.holders(uuid, when)
    }
    return Blame(next(iter(found.values())), How.HOLDER) if len(found) == 1 else None


def _in(cgroups: str, containers: Iterable[Container]) -> Container | None:
    """The container that has a process, the outermost: those within are its own."""
    paths = [path for _, path in cgroups_in(cgroups)]
    found = {
        own: each for each in containers for path in paths if (own := own_cgroup(path, each.id))
    }
    return found[min(found, key=len)] if found else None
