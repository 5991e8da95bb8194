"""Observe who uses which GPU, without an agent: NVML in a child process, bundles and cgroups.

Rules
- What cannot be seen becomes a note, and the rest is shown: without root there are no containers,
  without a driver no GPUs.
- Bundles are read for every snapshot, containerd's directories and the inventory less often.
- Files are read in a detached thread, so that a hanging read does not delay the exit.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

from hooks.config import Config
from hooks.errors import InventoryError
from hooks.node.inventory import Inventory
from integration.containers.bundles import Container
from integration.containers.errors import StateUnreadable
from integration.containers.procfs import Procfs
from integration.containers.shims import states_to_watch
from integration.detached import run_detached
from integration.inspection.top import UsageSnapshot
from integration.node.device_health.report import read_health
from integration.node.holders.energy import Meter
from integration.node.holders.values import Ledger
from integration.node.services.ledger.service import look
from integration.node.state.store import Unsampled
from integration.node.usage import owners_of, usage_of
from integration.nvml.inventory import look_at_node
from integration.nvml.sampler import sampling
from integration.nvml.snapshot import NodeSnapshot
from integration.nvml.values import Sample, Sampler

# Seconds until the inventory and containerd's directories are read again.
_NODE_MAX_AGE: Final = 30.0


class Observer:
    """Takes snapshots of GPU usage. Made by :func:`observing`.

    Attributes:
        sampler: queries NVML.
        inventory: the node's devices; None if unknown.
    """

    def __init__(self, config: Config, states: Sequence[str], proc: str) -> None:
        self._config, self._requested, self._proc = config, states, proc
        self.sampler: Sampler = Unsampled()
        self._meter = Meter()
        self._states: tuple[str, ...] = ()
        self._refreshed = -_NODE_MAX_AGE
        self._fault = ""
        self.inventory: Inventory | None = None

    def node_snapshot(self) -> NodeSnapshot:
        """Return the node's state as of the last refresh."""
        return NodeSnapshot(self.inventory, (self._fault,) if self._fault else ())

    async def snapshot(self) -> UsageSnapshot:
        """Return the usage now."""
        await run_detached(self._refresh_node)
        sample = await self.sampler.sample(max_age=0.0)
        ledger, notes = await run_detached(self._ledger)
        owners, names = await run_detached(self._processes, sample, ledger.containers)
        health = await run_detached(read_health, self._config) or {}
        return UsageSnapshot(
            time=time.time(),
            sample=sample,
            uses=usage_of(sample, ledger, owners, self._meter),
            names=names,
            inventory=self.inventory,
            health={uuid: str(entry["state"]) for uuid, entry in health.items()},
            notes=notes,
        )

    def _refresh_node(self) -> None:
        now = time.monotonic()
        if now - self._refreshed < _NODE_MAX_AGE:
            return
        self._refreshed = now
        self._states = states_to_watch(self._requested, self._proc)
        try:
            self.inventory, self._fault = look_at_node(self._config), ""
        except InventoryError as error:
            self.inventory, self._fault = None, str(error)

    def _ledger(self) -> tuple[Ledger, tuple[str, ...]]:
        notes = (self._fault,) if self._fault else ()
        try:
            return look(self._states, self.inventory, None, self._proc), notes
        except StateUnreadable as error:
            return Ledger(), (*notes, str(error))

    def _processes(
        self, sample: Sample, containers: Iterable[Container]
    ) -> tuple[Mapping[int, Container | None], Mapping[int, str]]:
        procfs = Procfs(self._proc)
        owners = owners_of(sample, containers, self._proc)
        return owners, {pid: procfs.name(pid) for pid in owners}


@asynccontextmanager
async def observing(
    config: Config, states: Sequence[str], proc: str = "/proc"
) -> AsyncIterator[Observer]:
    """Run an observer while the context lasts.

    Args:
        states: containerd's state directories; empty for the usual ones.
    """
    observer = Observer(config, states, proc)

    def say(*_: object, **__: object) -> None:
        """Ignore the child's messages; the sample contains its errors."""

    async with sampling(observer.node_snapshot, say, config) as observer.sampler:
        yield observer
