"""Attribute an error of a GPU to a container.

The first rule that finds a container decides:

1. The kernel log names a process: the container whose id is in that process's cgroup path. The
   monitor reads the cgroup together with the log line. If the process had already exited, it is
   looked up among recently seen processes (:mod:`integration.node.holders.recent_holders`).
2. Exactly one container holds a MIG device that the error names.
3. Exactly one container holds the GPU or a part of it.

A container that released the device a moment ago still counts as a holder, because errors arrive
late. If no rule applies, the container is unknown. The result states which rule decided: being the
only holder of a GPU that fell off the bus does not make the failure that container's fault.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from api.values import dataclass
from integration.containers.bundles import Container
from integration.containers.cgroups import cgroups_in, own_cgroup
from integration.node.faults.policy import Verdict
from integration.node.holders.recent_holders import RecentHolders
from integration.node.holders.values import Ledger
from integration.nvml.values import GpuEvent


class How(StrEnum):
    """The rule that attributed an error."""

    PROCESS = "by its process"
    ENDED = "by its process, which has ended"
    HOLDER = "only holder"
    OUTSIDE = "by a process that is in no container"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Attribution:
    """The container that caused an error, and how that is known."""

    container: Container | None = None  # None if no container caused it, or it is unknown
    how: How = How.UNKNOWN

    @property
    def titles(self) -> tuple[str, ...]:
        """The container's display name; empty if it is unknown."""
        return () if self.container is None else (self.container.title,)


def attribute(
    event: GpuEvent, verdict: Verdict, ledger: Ledger, recent_holders: RecentHolders
) -> Attribution:
    """Return the container that an error is attributed to."""
    if event.pid:
        if event.cgroups:
            holders = [each.container for each in (*ledger.holdings, *ledger.stopped)]
            container = _in(event.cgroups, (*holders, *ledger.containers))
            how = How.PROCESS if container else How.OUTSIDE
            return Attribution(container, how)
        container = recent_holders.container_of(event.pid, event.when)
        if container is not None:
            return Attribution(container, How.ENDED)
    if not verdict.certain:
        return Attribution()
    narrow = [uuid for uuid in verdict.devices if uuid != verdict.gpu]
    if verdict.gpu not in verdict.devices and (only := _only(recent_holders, narrow, event.when)):
        return only
    return _only(recent_holders, [verdict.gpu], event.when) or Attribution()


def _only(recent_holders: RecentHolders, uuids: Iterable[str], when: float) -> Attribution | None:
    """Return the single container that holds any of these devices; None for zero or several."""
    found = {
        held.container.bundle: held.container
        for uuid in uuids
        for held in recent_holders.holders(uuid, when)
    }
    return Attribution(next(iter(found.values())), How.HOLDER) if len(found) == 1 else None


def _in(cgroups: str, containers: Iterable[Container]) -> Container | None:
    """Return the outermost container of a process; nested ones belong to it."""
    paths = [path for _, path in cgroups_in(cgroups)]
    found = {
        own: each for each in containers for path in paths if (own := own_cgroup(path, each.id))
    }
    return found[min(found, key=len)] if found else None
