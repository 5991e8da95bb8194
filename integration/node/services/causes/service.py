"""Causes: record for each container the faults that it met.

::

    events ──▶ judge, blame ──▶ hits ──▶ fault_log ──▶ STATE/causes/NAMESPACE/ID.json: the shim
    lost GPUs, driver, MPS daemons ──▶     │    ╰──▶ state.causes: events on pods
    full GPU memory, limits ───────▶       ╰────────▶ counters: metrics
    what the driver needs to recover ──▶ changes what was told of the GPU

Rules
- It judges by NVIDIA's table alone, whether or not the operator has devices judged by it: what
  ended a container is no matter of policy.
- An event is held against each ledger of the next seconds, too: a container that has just been
  started is not in the ledger yet. One that was made after the event is not hit.
- After a failure of a device NVML is asked, once, what the GPU needs. It may hang, or not know.
- Xid 154 says what the GPU needs, and is a failure only if that is a reset.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio

from hooks.node.inventory import Inventory
from integration.containers.procfs import Procfs
from integration.detached import run_detached
from integration.node.device_health import health_store as store
from integration.node.device_health.health_table import HealthTable, judge, places_of
from integration.node.faults.fault_attribution import attribute
from integration.node.faults.fault_log import GPU_MEMORY, TOGETHER, FaultLog
from integration.node.faults.hits import DRIVER_LOST, GPU_LOST, MPS, XID, Hit, hits_of, lost
from integration.node.faults.limits import full_memory
from integration.node.faults.policy import Policy
from integration.node.holders.recent_holders import LATE
from integration.node.holders.values import Holding
from integration.node.services.causes.files import FAULT, Files, read_all
from integration.node.state.store import Unsampled
from integration.node.state.topic import call_on_change, version_of, wait_any
from integration.node.values.service_name import ServiceName
from integration.nvml.values import GpuEvent, epoch, now
from shim.causes.record import Whose
from shim.causes.xids import RECOVERY, RECOVERY_ACTIONS, Action, recovery_asked

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream

    from integration.containers.bundles import Container
    from integration.node.service import Context

# Events that are held against later ledgers at the same time.
_MOST_RECENT: Final = 256
# Seconds after a failure until the driver knows what the GPU needs.
_TO_KNOW: Final = 1.0
# Seconds by which a container's time and an event's may differ.
_SLACK: Final = 0.1


async def run(context: Context) -> None:
    """Keep the causes of containers' ends, until cancelled."""
    with context.state.gpu_events.listen() as events:
        clerk = _Clerk(context)  # what is posted while files are read is news
        clerk.fault_log.entries |= await run_detached(read_all, context.config.state)
        await clerk.keep(events)


@dataclass(slots=True)
class _Recent:
    """An event, and whom it has hit so far."""

    event: GpuEvent
    hit: set[str] = field(default_factory=set)


class _Clerk:
    """Who does it."""

    def __init__(self, context: Context) -> None:
        self._context, self._state = context, context.state
        self._causes = context.state.causes.publisher(ServiceName.CAUSES)
        self.fault_log = FaultLog()
        self._files = Files(context, self.fault_log)
        self._recent: deque[_Recent] = deque(maxlen=_MOST_RECENT)
        # What the driver has said that GPUs need.
        self._needs: dict[str, Action] = {}
        self._lost: frozenset[str] = frozenset()
        self._mps = context.state.mps_daemons.value
        self._exceeded = context.state.memory_excesses.value
        self._load = store.load_of_driver(context.config)
        self._failed = anyio.Event()
        self._places_of: Inventory | None = None
        self._places = HealthTable()

    async def keep(self, events: MemoryObjectReceiveStream[GpuEvent]) -> None:
        """Go by everything that is told.

        Args:
            events: what happens.
        """
        state = self._state
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._files.keep)
                tasks.start_soon(self._ask)
                tasks.start_soon(self._forget)
                follow = partial(call_on_change, at_once=True)
                tasks.start_soon(follow, self._ledger, state.ledger)
                tasks.start_soon(follow, self._losses, state.lost_gpus)
                tasks.start_soon(follow, self._driver, state.node)
                tasks.start_soon(follow, self._daemons, state.mps_daemons)
                tasks.start_soon(follow, self._sampled, state.sample)
                tasks.start_soon(follow, self._used, state.usage)
                tasks.start_soon(follow, self._limits, state.memory_excesses)
                self._tell()
                async for event in events:
                    self._hear(event)
        finally:
            self._causes.publish({})
            state.faults.report(FAULT, "")

    # -- Xids ----------------------------------------------------------------------------------

    def _hear(self, event: GpuEvent) -> None:
        if event.kind != XID:
            return
        recent = _Recent(event)
        if event.xid == RECOVERY:
            action = recovery_asked(event.text)
            if action is None:
                return
            self._heed(self._table().gpu_of(event), action, epoch(event.when) - TOGETHER)
            if action in {Action.NOTHING, Action.DRAIN}:
                return
        self._hit(recent)
        self._recent.append(recent)
        self._tell()

    def _table(self) -> HealthTable:
        """Where devices are; of a storm's events for each look at the node once."""
        inventory = self._state.node.value.inventory
        if inventory is not self._places_of:
            self._places_of = inventory
            self._places = (
                HealthTable(places_of(inventory, {})) if inventory is not None else HealthTable()
            )
        return self._places

    def _hit(self, recent: _Recent, *, later: bool = False) -> None:
        """Note whom an event hits, once each.

        Args:
            later: whether containers are known by now that were not when it was heard.
        """
        event, state = recent.event, self._state
        verdict = judge(self._table(), event, Policy())
        whose = attribute(event, verdict, state.ledger.value, state.recent_holders)
        holders = [
            each
            for uuid in dict.fromkeys((*verdict.devices, verdict.gpu))
            for each in self._holders_of(uuid, verdict.gpu, verdict.devices, event.when)
        ]
        hits = hits_of(
            event,
            verdict,
            whose,
            holders,
            at=epoch(event.when),
            action=self._needs.get(verdict.gpu),
            mps=self._shared_by_mps(),
        )
        for hit in hits:
            bundle = hit.container.bundle
            if bundle in recent.hit or not _was_there(hit.container, event.when, known=not later):
                continue
            recent.hit.add(bundle)
            is_known = self.fault_log.has_failed(hit.container, hit.fault.gpu)
            if event.xid == RECOVERY and is_known:
                continue  # it says what to do about what was told already
            self._note(hit)

    def _holders_of(
        self, uuid: str, gpu: str, devices: Iterable[str], when: float
    ) -> tuple[Holding, ...]:
        """Who holds a device that was hit: those who have the whole GPU hold its parts, too."""
        found = self._state.recent_holders.holders(uuid, when)
        if uuid == gpu and gpu not in devices:
            return tuple(each for each in found if gpu in each.devices)
        return found

    def _shared_by_mps(self) -> set[str]:
        return {uuid for each in self._state.mps_daemons.value.values() for uuid in each.devices}

    def _note(self, hit: Hit) -> None:
        self.fault_log.add(hit)
        fault = hit.fault
        self._state.counters.faulted(fault.kind, fault.code, fault.whose)
        if fault.kind == XID and fault.whose in {Whose.DEVICE, Whose.UNCLEAR}:
            self._failed.set()

    # -- what the driver says that a GPU needs -------------------------------------------------

    async def _ask(self) -> None:
        """Ask NVML after each failure, until cancelled."""
        while True:
            await self._failed.wait()
            await anyio.sleep(_TO_KNOW)
            self._failed = anyio.Event()
            sampler = self._state.sampler.value
            if not isinstance(sampler, Unsampled):
                await sampler.sample(max_age=0)  # it is posted, and heard there

    def _sampled(self) -> None:
        sample = self._state.sample.value
        if sample is None or sample.failure:
            return
        for gpu in sample.gpus:
            if gpu.recovery_action is not None and gpu.recovery_action in RECOVERY_ACTIONS:
                action = RECOVERY_ACTIONS[gpu.recovery_action]
                # What it said before it can have known of a fault says nothing of that.
                recent = max(
                    (r.event.when for r in self._recent if r.event.gpu == gpu.uuid), default=0.0
                )
                if action == Action.NOTHING and sample.when < recent + _TO_KNOW:
                    continue
                self._heed(gpu.uuid, action, epoch(sample.when) - TOGETHER)
        self._tell()

    def _heed(self, gpu: str, action: Action, since: float) -> None:
        if action == Action.NOTHING:
            self._needs.pop(gpu, None)
        elif gpu:
            self._needs[gpu] = action
        self.fault_log.heed(gpu, action, since)

    # -- what is gone --------------------------------------------------------------------------

    def _losses(self) -> None:
        before, self._lost = self._lost, frozenset(self._state.lost_gpus.value)
        at = now()
        for gpu in self._lost - before:
            hits = lost(
                GPU_LOST,
                "the GPU does not answer any more",
                self._state.recent_holders.holders(gpu, at),
                at=time.time(),
                gpu=gpu,
                action=Action.RESET,
            )
            for hit in hits:
                if not self.fault_log.has_failed(hit.container, gpu):
                    self._note(hit)
        self._tell()

    def _driver(self) -> None:
        """See whether the driver was unloaded or loaded anew below those who use it."""
        before, self._load = self._load, store.load_of_driver(self._context.config)
        if not before or before == self._load:
            return
        what = "the driver was loaded anew" if self._load else "the driver was unloaded"
        holders = [
            each
            for gpu in {gpu for held in self._state.ledger.value.holdings for gpu in held.gpus}
            for each in self._state.recent_holders.holders(gpu, now())
        ]
        for hit in lost(DRIVER_LOST, what, holders, at=time.time(), whose=Whose.HOST):
            self._note(hit)
        self._tell()

    def _daemons(self) -> None:
        """See whether an MPS daemon has ended by itself: its clients' work is lost."""
        before, self._mps = self._mps, self._state.mps_daemons.value
        at = now()
        for name, daemon in self._mps.items():
            known = before.get(name)
            if known is None or daemon.restarts <= known.restarts:
                continue
            # One that has ended serves none any more.
            holders = [
                h for uuid in known.devices for h in self._state.recent_holders.holders(uuid, at)
            ]
            for hit in lost(
                MPS,
                "the MPS control daemon ended",
                holders,
                at=time.time(),
                whose=Whose.NEIGHBOUR,
                sure=False,
            ):
                self._note(hit)
        self._tell()

    # -- memory --------------------------------------------------------------------------------

    def _used(self) -> None:
        """Note who holds a GPU whose memory is full, for as long as it is."""
        sample = self._state.sample.value
        if sample is None or sample.failure:
            return
        hits = full_memory(sample, self._state.usage.value, epoch(sample.when))
        full = {(hit.container.namespace, hit.container.id) for hit in hits}
        there = {(each.namespace, each.id) for each in self._state.ledger.value.containers}
        # Of one that has gone it is known how it was last.
        self.fault_log.drop(GPU_MEMORY, there - full)
        for hit in hits:
            self.fault_log.add(hit)
        self._tell()

    def _limits(self) -> None:
        before, self._exceeded = self._exceeded, self._state.memory_excesses.value
        for which, hit in self._exceeded.items():
            if before.get(which) != hit:
                self._note(hit)
        self._tell()

    # -- containers ----------------------------------------------------------------------------

    def _ledger(self) -> None:
        if not self._state.ledger.version:
            return  # nobody has looked yet who is there
        at = now()
        while self._recent and at - self._recent[0].event.when > LATE:
            self._recent.popleft()
        for recent in self._recent:
            self._hit(recent, later=True)
        self.fault_log.expire(self._state.ledger.value.containers, at)
        self._tell()

    async def _forget(self) -> None:
        """Forget who is gone for long, until cancelled."""
        while True:
            version = version_of(self._state.ledger, self._state.causes)
            due = self.fault_log.next_expiry()
            pause = float("inf") if due is None else max(0.0, due - now()) + 1
            await wait_any(self._state.ledger, self._state.causes, since=version, timeout=pause)
            self._ledger()

    def _tell(self) -> None:
        """Have it written, and tell the others."""
        if self.fault_log.unwritten:
            self._files.changed()
            self._causes.publish(dict(self.fault_log.entries))


def _was_there(container: Container, when: float, *, known: bool) -> bool:
    """Whether a container's process was made before something happened.

    Args:
        when: seconds since boot.
        known: the answer, if its bundle does not say when it was made.
    """
    created = container.created
    if created is None:
        return known
    if created <= epoch(when) + _SLACK:
        return True
    # By a clock that was set back since it may seem to be made later than it was.
    status = Procfs().status(container.pid) if container.pid else None
    return status is not None and status.existed_at(when, _SLACK)
