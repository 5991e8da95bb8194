"""Causes: record for each container the faults that affected it.

::

    events ──▶ judge, attribute ──▶ hits ──▶ fault_log ──▶ STATE/causes/NAMESPACE/ID.json: the shim
    lost GPUs, driver, MPS daemons ──▶         │    ╰──▶ state.causes: events on pods
    full GPU memory, limits ───────▶           ╰────────▶ counters: metrics
    the driver's recovery actions ──▶ update the GPU's faults in the fault log

Rules
- Only NVIDIA's table decides what an Xid means here. The operator's health policy does not change
  why a container exited.
- The service also compares an event with each ledger of the next few seconds, since a container
  that has just started is not in the ledger yet. An event does not affect a container that was
  created after it.
- After a device has failed, the service samples NVML once to learn the recovery action. NVML may
  hang, or not know the action.
- Xid 154, and NVML's event for it, names the recovery action. It is a failure only if the action is
  a reset.
- A fatal error of an NVSwitch hits the containers that hold the GPU at its port; if that is not
  known, it may hit all that hold a GPU.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from hooks.node.inventory import Inventory
from integration.containers.bundles import Container
from integration.containers.procfs import Procfs
from integration.detached import run_detached
from integration.node.device_health import health_store as store
from integration.node.device_health.health_table import HealthTable, judge, places_of
from integration.node.faults.fault_attribution import attribute
from integration.node.faults.fault_log import GPU_MEMORY, TOGETHER, FaultLog
from integration.node.faults.hits import DRIVER_LOST, GPU_LOST, MPS, XID, Hit, hits_of, lost
from integration.node.faults.limits import full_memory
from integration.node.faults.policy import Policy, action_of, xid_of
from integration.node.faults.sxids import SXID, is_fatal
from integration.node.holders.recent_holders import LATE
from integration.node.holders.values import Holding
from integration.node.service import Context
from integration.node.services.causes.files import FAULT, Files, read_all
from integration.node.state.store import Unsampled
from integration.node.state.topic import call_on_change, version_of, wait_any
from integration.node.values.service_name import ServiceName
from integration.nvml.values import GpuEvent, epoch, now
from shim.causes.record import Whose
from shim.causes.xids import RECOVERY, Action, recovery_action

# Upper bound of the events that are compared with later ledgers.
_MOST_RECENT: Final = 256
# Seconds after a failure until the driver knows the recovery action.
_SETTLE: Final = 1.0
# Seconds by which the times of a container and of an event may differ.
_SLACK: Final = 0.1


async def run(context: Context) -> None:
    """Record the faults of containers until cancelled."""
    with context.state.gpu_events.listen() as events:
        recorder = _Recorder(context)  # subscribed first: events during the read are not missed
        recorder.fault_log.entries |= await run_detached(read_all, context.config.state)
        await recorder.keep(events)


@dataclass(slots=True)
class _Recent:
    """An event, and the bundles of the containers that it has hit."""

    event: GpuEvent
    hit: set[str] = field(default_factory=set)


class _Recorder:
    """Records faults from the agent's state."""

    def __init__(self, context: Context) -> None:
        self._context, self._state = context, context.state
        self._causes = context.state.causes.publisher(ServiceName.CAUSES)
        self.fault_log = FaultLog()
        self._files = Files(context, self.fault_log)
        self._recent: deque[_Recent] = deque(maxlen=_MOST_RECENT)
        # The driver's recovery action for each GPU that needs one.
        self._recovery_actions: dict[str, Action] = {}
        self._lost: frozenset[str] = frozenset()
        self._mps = context.state.mps_daemons.value
        self._exceeded = context.state.memory_excesses.value
        self._load = store.load_of_driver(context.config)
        self._failed = anyio.Event()
        self._places_of: Inventory | None = None
        self._places = HealthTable()

    async def keep(self, events: MemoryObjectReceiveStream[GpuEvent]) -> None:
        """Record faults until cancelled.

        Args:
            events: Xids and other events of the GPUs.
        """
        state = self._state
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._files.keep)
                tasks.start_soon(self._sample_failed)
                tasks.start_soon(self._expire)
                follow = partial(call_on_change, at_once=True)
                tasks.start_soon(follow, self._on_ledger, state.ledger)
                tasks.start_soon(follow, self._on_lost_gpus, state.lost_gpus)
                tasks.start_soon(follow, self._on_driver, state.node)
                tasks.start_soon(follow, self._on_mps_daemons, state.mps_daemons)
                tasks.start_soon(follow, self._on_sample, state.sample)
                tasks.start_soon(follow, self._on_usage, state.usage)
                tasks.start_soon(follow, self._on_excesses, state.memory_excesses)
                self._publish()
                async for event in events:
                    self._on_event(event)
        finally:
            self._causes.publish({})
            state.faults.report(FAULT, "")

    # -- Xids ----------------------------------------------------------------------------------

    def _on_event(self, event: GpuEvent) -> None:
        if is_fatal(event):
            self._on_switch_error(event)
        if not xid_of(event):
            return
        recent = _Recent(event)
        if xid_of(event) == RECOVERY:
            action = action_of(event)
            if action is None:
                return
            self._set_recovery_action(
                self._table().gpu_of(event), action, epoch(event.when) - TOGETHER
            )
            if action in {Action.NOTHING, Action.DRAIN}:
                return
        self._hit(recent)
        self._recent.append(recent)
        self._publish()

    def _on_switch_error(self, event: GpuEvent) -> None:
        """Record the containers whose GPUs a fatal error of an NVSwitch hits, or may hit."""
        verdict = judge(self._table(), event, Policy())
        holders = [
            each
            for uuid in verdict.devices
            for each in self._state.recent_holders.holders(uuid, event.when)
        ]
        for hit in lost(
            SXID, verdict.reason, holders, at=epoch(event.when), gpu=verdict.gpu,
            action=Action.RESET if verdict.gpu else Action.SWITCHES, sure=verdict.certain,
        ):  # fmt: skip
            self._record(hit)
        self._publish()

    def _table(self) -> HealthTable:
        """Return the places of devices; computed once for each inventory."""
        inventory = self._state.node.value.inventory
        if inventory is not self._places_of:
            self._places_of = inventory
            self._places = (
                HealthTable(places_of(inventory, {})) if inventory is not None else HealthTable()
            )
        return self._places

    def _hit(self, recent: _Recent, *, later: bool = False) -> None:
        """Record the containers that an event hits, once each.

        Args:
            later: whether the ledger is newer than the event.
        """
        event, state = recent.event, self._state
        verdict = judge(self._table(), event, Policy())
        attribution = attribute(event, verdict, state.ledger.value, state.recent_holders)
        holders = [
            each
            for uuid in dict.fromkeys((*verdict.devices, verdict.gpu))
            for each in self._holders_of(uuid, verdict.gpu, verdict.devices, event.when)
        ]
        hits = hits_of(
            event,
            verdict,
            attribution,
            holders,
            at=epoch(event.when),
            action=self._recovery_actions.get(verdict.gpu),
            mps=self._shared_by_mps(),
        )
        for hit in hits:
            bundle = hit.container.bundle
            if bundle in recent.hit or not _was_there(hit.container, event.when, known=not later):
                continue
            recent.hit.add(bundle)
            is_known = self.fault_log.has_failed(hit.container, hit.fault.gpu)
            if xid_of(event) == RECOVERY and is_known:
                continue  # it only names the recovery action for a recorded fault
            self._record(hit)

    def _holders_of(
        self, uuid: str, gpu: str, devices: Iterable[str], when: float
    ) -> tuple[Holding, ...]:
        """Return the holders of a device that was hit, including those of its whole GPU."""
        holders = self._state.recent_holders.holders(uuid, when)
        if uuid == gpu and gpu not in devices:
            return tuple(each for each in holders if gpu in each.devices)
        return holders

    def _shared_by_mps(self) -> set[str]:
        return {uuid for each in self._state.mps_daemons.value.values() for uuid in each.devices}

    def _record(self, hit: Hit) -> None:
        self.fault_log.add(hit)
        fault = hit.fault
        self._state.counters.faulted(fault.kind, fault.code, fault.whose)
        if fault.kind == XID and fault.whose in {Whose.DEVICE, Whose.UNCLEAR}:
            self._failed.set()

    # -- recovery actions of the driver --------------------------------------------------------

    async def _sample_failed(self) -> None:
        """Sample NVML after each failure, until cancelled."""
        while True:
            await self._failed.wait()
            await anyio.sleep(_SETTLE)
            self._failed = anyio.Event()
            sampler = self._state.sampler.value
            if not isinstance(sampler, Unsampled):
                await sampler.sample(max_age=0)  # published as state.sample

    def _on_sample(self) -> None:
        sample = self._state.sample.value
        if sample is None or sample.failure:
            return
        for gpu in sample.gpus:
            if gpu.recovery_action is not None:
                action = recovery_action(gpu.recovery_action)
                # An action of "nothing" from before the driver could know the fault does not count.
                recent = max(
                    (r.event.when for r in self._recent if r.event.gpu == gpu.uuid), default=0.0
                )
                if action == Action.NOTHING and sample.when < recent + _SETTLE:
                    continue
                self._set_recovery_action(gpu.uuid, action, epoch(sample.when) - TOGETHER)
        self._publish()

    def _set_recovery_action(self, gpu: str, action: Action, since: float) -> None:
        if action == Action.NOTHING:
            self._recovery_actions.pop(gpu, None)
        elif gpu:
            self._recovery_actions[gpu] = action
        self.fault_log.heed(gpu, action, since)

    # -- lost GPUs, driver and MPS daemons -----------------------------------------------------

    def _on_lost_gpus(self) -> None:
        before, self._lost = self._lost, frozenset(self._state.lost_gpus.value)
        at = now()
        for gpu in self._lost - before:
            hits = lost(
                GPU_LOST,
                "the GPU stopped answering",
                self._state.recent_holders.holders(gpu, at),
                at=time.time(),
                gpu=gpu,
                action=Action.RESET,
            )
            for hit in hits:
                if not self.fault_log.has_failed(hit.container, gpu):
                    self._record(hit)
        self._publish()

    def _on_driver(self) -> None:
        """Record a fault if the driver was unloaded or reloaded while containers used it."""
        before, self._load = self._load, store.load_of_driver(self._context.config)
        if not before or before == self._load:
            return
        what = "the driver was reloaded" if self._load else "the driver was unloaded"
        holders = [
            each
            for gpu in {gpu for held in self._state.ledger.value.holdings for gpu in held.gpus}
            for each in self._state.recent_holders.holders(gpu, now())
        ]
        for hit in lost(DRIVER_LOST, what, holders, at=time.time(), whose=Whose.HOST):
            self._record(hit)
        self._publish()

    def _on_mps_daemons(self) -> None:
        """Record a fault if an MPS daemon exited by itself, since its clients lose their work."""
        before, self._mps = self._mps, self._state.mps_daemons.value
        at = now()
        for name, daemon in self._mps.items():
            known = before.get(name)
            if known is None or daemon.restarts <= known.restarts:
                continue
            # The devices of the exited daemon; the new one may serve others.
            holders = [
                h for uuid in known.devices for h in self._state.recent_holders.holders(uuid, at)
            ]
            for hit in lost(
                MPS,
                "the MPS control daemon exited",
                holders,
                at=time.time(),
                whose=Whose.NEIGHBOUR,
                sure=False,
            ):
                self._record(hit)
        self._publish()

    # -- memory --------------------------------------------------------------------------------

    def _on_usage(self) -> None:
        """Record the containers on a GPU whose memory is full, as long as it is full."""
        sample = self._state.sample.value
        if sample is None or sample.failure:
            return
        hits = full_memory(sample, self._state.usage.value, epoch(sample.when))
        full = {(hit.container.namespace, hit.container.id) for hit in hits}
        present = {(each.namespace, each.id) for each in self._state.ledger.value.containers}
        # A container that is gone keeps its last state.
        self.fault_log.drop(GPU_MEMORY, present - full)
        for hit in hits:
            self.fault_log.add(hit)
        self._publish()

    def _on_excesses(self) -> None:
        before, self._exceeded = self._exceeded, self._state.memory_excesses.value
        for which, hit in self._exceeded.items():
            if before.get(which) != hit:
                self._record(hit)
        self._publish()

    # -- containers ----------------------------------------------------------------------------

    def _on_ledger(self) -> None:
        if not self._state.ledger.version:
            return  # there is no ledger yet
        at = now()
        while self._recent and at - self._recent[0].event.when > LATE:
            self._recent.popleft()
        for recent in self._recent:
            self._hit(recent, later=True)
        self.fault_log.expire(self._state.ledger.value.containers, at)
        self._publish()

    async def _expire(self) -> None:
        """Drop the faults of containers that are long gone, until cancelled."""
        while True:
            version = version_of(self._state.ledger, self._state.causes)
            due = self.fault_log.next_expiry()
            pause = float("inf") if due is None else max(0.0, due - now()) + 1
            await wait_any(self._state.ledger, self._state.causes, since=version, timeout=pause)
            self._on_ledger()

    def _publish(self) -> None:
        """Write and publish the fault log if it changed."""
        if self.fault_log.unwritten:
            self._files.changed()
            self._causes.publish(dict(self.fault_log.entries))


def _was_there(container: Container, when: float, *, known: bool) -> bool:
    """Return whether a container's process existed at a time.

    Args:
        when: seconds since boot.
        known: the answer if the bundle has no creation time.
    """
    created = container.created
    if created is None:
        return known
    if created <= epoch(when) + _SLACK:
        return True
    # If the clock was set back since, the creation time may seem later than it was.
    status = Procfs().status(container.pid) if container.pid else None
    return status is not None and status.existed_at(when, _SLACK)
