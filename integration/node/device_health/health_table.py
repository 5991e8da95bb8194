"""The health of all devices of a node, and how events, inventories and samples change it.

Rules
- On a GPU in MIG mode an error affects the devices of the instance that it names. An error without
  an instance, of the whole GPU, or fatal affects the GPU and all of its MIG devices. (NVIDIA's
  plugin watches only one MIG device of each GPU.)
- An error of an instance that no longer exists, or of an unknown GPU, cannot be assigned. If it is
  serious, the possible devices become suspect and are sampled; it counts against none of them.
- A GPU that NVML cannot open or does not list, or that the node no longer has, is lost together
  with its MIG devices. So is every device when the driver is gone. Without NVML the MIG devices are
  unknown, so none of them is considered gone.
- If a MIG device is gone while its GPU answers, it was removed on purpose, by a person or when its
  claim ended. The table forgets it, but keeps the device's own errors for a while: the device that
  is created in its place gets them, whether its UUID is the same or new.
- A new MIG device inherits the condition of its GPU if the GPU is not allocated.
- A driver reload counts as a reset, and so does a GPU's counter that decreases. A temporary lack of
  driver's files is not a reset, and neither is an incomplete list from NVML.

The module does no I/O; :mod:`integration.node.device_health.device_state` handles one device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from api.values import dataclass, field, replace
from hooks.node.inventory import Inventory
from integration.node.device_health.device_state import (
    Answer,
    Clear,
    Condition,
    Contained,
    Error,
    Lost,
    Moment,
    Reset,
    Rules,
    Signal,
    Silence,
    Watch,
    due,
    step,
)
from integration.node.faults.policy import DBE, TOGETHER, XID, Policy, Verdict, severity_of, xid_of
from integration.node.faults.sxids import title_of
from integration.node.faults.xids import Scope, Severity, about
from integration.node.values.health import HealthState
from integration.nvml.values import GpuEvent, GpuSample, Sample
from shim.causes.xids import Action, Remedy, recovery_action

_CONTAINED: Final = 94

# NVML's value for "no instance".
_NO_INSTANCE: Final = 0xFFFFFFFF
# While NVML is silent: how many samples to take within the patience, and the least seconds between.
_LOOKS: Final = 4
_SOONEST: Final = 0.05
# Joules that a counter may appear to go back: NVML rounds to millijoules.
_TOLERANCE: Final = 1.0

_GONE: Final = "the node no longer has it"
_UNCOUNTED: Final = "NVML does not list it"


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a device."""

    uuid: str
    gpu: str  # UUID of the GPU that it is, or is a part of
    bus_id: str = ""  # PCI address of the GPU
    gpu_instance: int | None = None  # None for a whole GPU
    compute_instance: int | None = None  # None for a whole GPU
    profile: str = ""  # of a MIG device ("1g.10gb"); "" if unknown

    @property
    def is_gpu(self) -> bool:
        """Whether it is a whole GPU."""
        return self.uuid == self.gpu

    def is_alike(self, other: Place) -> bool:
        """Whether another MIG device is, or was, the same part of the same GPU.

        The driver numbers instances by their placement on the GPU.
        """
        ours, theirs = (
            (each.gpu, each.gpu_instance, each.compute_instance) for each in (self, other)
        )
        return ours == theirs and (
            self.profile == other.profile or not (self.profile and other.profile)
        )


@dataclass(frozen=True, slots=True)
class HealthTable:
    """The health of all devices."""

    places: Mapping[str, Place] = field(default_factory=dict)  # current or last, by UUID
    conditions: Mapping[str, Condition] = field(default_factory=dict)  # by UUID
    gone: frozenset[str] = frozenset()  # UUIDs of devices that are missing now
    load: str = ""  # id of the driver's load; "" for none yet
    # counters of each GPU: joules and uncorrected errors
    counters: Mapping[str, tuple[float | None, int | None]] = field(default_factory=dict)
    # time of the last contained error, by GPU
    contained: Mapping[str, float] = field(default_factory=dict)

    def of_gpu(self, gpu: str) -> tuple[str, ...]:
        """Return the UUIDs of a GPU and its present MIG devices.

        Args:
            gpu: the GPU's UUID.
        """
        return tuple(
            uuid for uuid, it in self.places.items() if it.gpu == gpu and uuid not in self.gone
        )

    def gpu_of(self, event: GpuEvent) -> str:
        """Return the UUID of the GPU that an event is about; "" if unknown."""
        if event.gpu in self.places:
            return self.places[event.gpu].gpu
        named = event.bus_id.lower()
        return next(
            (
                it.gpu
                for it in self.places.values()
                if named and it.is_gpu and _bus(it.bus_id) == _bus(named)
            ),
            "",
        )


def _bus(address: str) -> tuple[str, ...]:
    """Return a PCI address without its function, which the kernel log omits."""
    domain, _, rest = address.lower().partition(":")
    return (domain.lstrip("0"), rest.partition(".")[0])


def places_of(inventory: Inventory, known: Mapping[str, Place]) -> dict[str, Place]:
    """Return the positions of a node's devices.

    Args:
        known: the earlier positions. A GPU that no process has open has no UUID in procfs; without
            NVML it is assumed to be the GPU that was known at its address.
    """
    at = {place.bus_id: place for place in known.values() if place.is_gpu}
    gpus = {
        gpu.index: at.get(gpu.bus_id) if not gpu.uuid else Place(gpu.uuid, gpu.uuid, gpu.bus_id)
        for gpu in inventory.gpus
    }
    whole = {place.uuid: place for place in gpus.values() if place is not None}
    parts = {
        device.uuid: Place(
            device.uuid,
            gpu.uuid,
            gpu.bus_id,
            device.gpu_instance,
            device.compute_instance,
            device.profile,
        )
        for device in inventory.mig_devices
        if (gpu := gpus.get(device.gpu)) is not None
    }
    return {**whole, **parts}


def _stepped(
    table: HealthTable, uuids: Iterable[str], signal: Signal, now: Moment, rules: Rules
) -> HealthTable:
    conditions = dict(table.conditions)
    for uuid in uuids:
        conditions[uuid] = step(conditions.get(uuid) or Condition(), signal, now, rules)
    return replace(table, conditions=conditions)


# -- inventories -------------------------------------------------------------------------------


def after_inventory(
    table: HealthTable,
    places: Mapping[str, Place] | None,
    lost: Mapping[str, str],
    now: Moment,
    rules: Rules,
    *,
    load: str = "",
    complete: bool = True,
    why: str = "",
) -> HealthTable:
    """Return the table after a new inventory.

    Args:
        places: the positions of the devices; None if the driver is gone.
        lost: why a GPU cannot be opened, by UUID.
        load: the id of the driver's load; "" if unknown.
        complete: whether all MIG devices are known.
        why: the reason if the driver is gone.
    """
    if load and table.load and load != table.load:
        table = _stepped(table, table.conditions, Reset(), now, rules)
        table = replace(table, counters={})
    table = replace(table, load=load or table.load)
    if places is None:
        there = [uuid for uuid in table.conditions if uuid not in table.gone]
        gone = Lost(f"the driver is gone: {why}", "install or load the driver", is_its_own=False)
        return _stepped(table, there, gone, now, rules)
    if complete:
        table = _without_removed(table, places, lost)
    table = _in_place(_gone(table, places, now, rules, complete=complete), places)
    conditions = dict(table.conditions)
    for uuid, place in places.items():
        if uuid not in conditions:
            of_gpu = conditions.get(place.gpu, Condition())
            conditions[uuid] = Condition() if of_gpu.state.is_allocatable else of_gpu
    kept = {uuid: table.places[uuid] for uuid in conditions if uuid not in places}
    table = replace(
        table, places={**kept, **places}, conditions=conditions, gone=table.gone - places.keys()
    )
    return after_loss(table, lost, now, rules)


def after_loss(
    table: HealthTable, lost: Mapping[str, str], now: Moment, rules: Rules
) -> HealthTable:
    """Return the table after GPUs were lost.

    Args:
        lost: why each does not answer, by UUID.
    """
    for gpu, reason in lost.items():
        table = _stepped(table, table.of_gpu(gpu), Lost(reason), now, rules)
    return table


def _without_removed(
    table: HealthTable, places: Mapping[str, Place], lost: Mapping[str, str]
) -> HealthTable:
    """Drop MIG devices that were removed on purpose, but keep their own errors."""
    removed = {
        uuid
        for uuid, place in table.places.items()
        if not (place.is_gpu or uuid in places or uuid in table.gone)
        and place.gpu in places
        and not (place.gpu in lost or table.conditions.get(place.gpu, Condition()).lost)
    }
    clean = {uuid for uuid in removed if not table.conditions[uuid].own}
    return _forgotten(replace(table, gone=table.gone | removed), clean)


def _in_place(table: HealthTable, places: Mapping[str, Place]) -> HealthTable:
    """Carry the errors of gone MIG devices over to the devices created in their place."""
    others = {
        uuid
        for uuid in table.gone & places.keys()
        if not (places[uuid].is_gpu or places[uuid].is_alike(table.places[uuid]))
    }
    table = _forgotten(table, others)
    for place in places.values():
        if place.is_gpu or place.uuid in table.places:
            continue
        for uuid in table.gone - places.keys():
            if place.is_alike(table.places[uuid]):
                known = {**table.conditions, place.uuid: table.conditions[uuid]}
                there = {**table.places, place.uuid: place}
                table = _forgotten(replace(table, places=there, conditions=known), {uuid})
                break
    return table


def _forgotten(table: HealthTable, uuids: Collection[str]) -> HealthTable:
    return replace(
        table,
        places={uuid: place for uuid, place in table.places.items() if uuid not in uuids},
        conditions={uuid: each for uuid, each in table.conditions.items() if uuid not in uuids},
        gone=table.gone.difference(uuids),
    )


def _gone(
    table: HealthTable, places: Mapping[str, Place], now: Moment, rules: Rules, *, complete: bool
) -> HealthTable:
    """Mark missing devices as lost, and forget those missing for long."""
    missing = [
        uuid
        for uuid, place in table.places.items()
        if uuid not in places
        and uuid not in table.gone
        and (place.is_gpu or complete or place.gpu not in places)
    ]
    table = _stepped(table, missing, Lost(_GONE, "find out why it is gone"), now, rules)
    table = replace(table, gone=table.gone.union(missing))
    old = {
        uuid
        for uuid in table.gone - places.keys()
        if now.boot - table.conditions[uuid].last_error > rules.longest
    }
    return _forgotten(table, old)


# -- events ------------------------------------------------------------------------------------


def judge(table: HealthTable, event: GpuEvent, policy: Policy) -> Verdict:
    """Return the meaning of an event."""
    gpu = table.gpu_of(event)
    number = xid_of(event)
    xid = about(number) if number else None
    severity, remedy, over = severity_of(event, policy, table.contained.get(gpu))
    if event.switch is not None:
        return _judge_switch(table, gpu, title_of(event, event.switch), severity, remedy)
    if not gpu:
        suspects = tuple(uuid for uuid in table.places if uuid not in table.gone)
        serious = severity.weight >= Severity.UNHEALTHY.weight
        capped = Severity.SUSPECT if serious else Severity.IGNORE
        return Verdict("", xid, capped, suspects if serious else (), certain=False, remedy=remedy)
    everything = table.of_gpu(gpu)
    instance = _instance(event.gpu_instance)
    whole = xid is None or xid.scope == Scope.GPU or severity == Severity.FATAL
    if whole or instance is None:
        return Verdict(gpu, xid, severity, everything, remedy=remedy, over=over)
    part = _instance(event.compute_instance)
    hit = tuple(
        uuid
        for uuid in everything
        if table.places[uuid].gpu_instance == instance
        and (part is None or table.places[uuid].compute_instance == part)
    )
    if hit:
        return Verdict(gpu, xid, severity, hit, remedy=remedy)
    capped = min(severity, Severity.SUSPECT, key=lambda each: each.weight)
    return Verdict(gpu, xid, capped, everything, certain=False, remedy=remedy)


def _judge_switch(
    table: HealthTable, gpu: str, what: str, severity: Severity, remedy: Remedy
) -> Verdict:
    """Return the meaning of an NVSwitch's error (:mod:`integration.node.faults.sxids`)."""
    parted = {place.gpu for place in table.places.values() if not place.is_gpu}
    linked = tuple(
        uuid
        for uuid, place in table.places.items()
        if place.is_gpu and gpu in {"", uuid} and uuid not in table.gone | parted
    )
    if severity != Severity.FATAL or not linked:
        return Verdict(gpu, None, Severity.IGNORE, (), what=what)
    capped = severity if gpu else Severity.SUSPECT
    return Verdict(gpu, None, capped, linked, certain=bool(gpu), remedy=remedy, what=what)


def _instance(number: int | None) -> int | None:
    return None if number is None or number >= _NO_INSTANCE else number


def after_event(
    table: HealthTable, event: GpuEvent, verdict: Verdict, now: Moment, rules: Rules
) -> HealthTable:
    """Return the table after an event.

    Args:
        verdict: the meaning of the event (:func:`judge`), with the containers that it is attributed
            to.
    """
    if event.kind == XID and event.xid == _CONTAINED and verdict.gpu:
        table = replace(table, contained={**table.contained, verdict.gpu: event.when})
        recent = [
            uuid
            for uuid in table.of_gpu(verdict.gpu)
            if abs(now.boot - table.conditions[uuid].last_error) <= TOGETHER
        ]
        table = _stepped(table, recent, Contained(DBE), now, rules)
    if verdict.over:
        table = _stepped(table, verdict.devices, Reset(), now, rules)
    error = Error(
        verdict.severity,
        verdict.reason,
        xid=event.xid,
        remedy=verdict.remedy,
        blamed=verdict.blamed,
        counts=verdict.certain and event.kind == XID,
        times=event.times,
        is_its_own=verdict.certain and verdict.gpu not in verdict.devices,
    )
    return _stepped(table, verdict.devices, error, now, rules)


def after_watch(
    table: HealthTable, unwatched: Mapping[str, str], now: Moment, rules: Rules
) -> HealthTable:
    """Return the table after a change of the GPUs that deliver no events.

    Args:
        unwatched: the reason by the GPU's UUID; "" stands for all GPUs.
    """
    for uuid, place in table.places.items():
        why = unwatched.get(place.gpu) or unwatched.get("") or ""
        if uuid in table.gone or table.conditions[uuid].unwatched == why:
            continue
        table = _stepped(table, [uuid], Watch(why), now, rules)
    return table


def after_clear(table: HealthTable, uuids: Iterable[str], now: Moment, rules: Rules) -> HealthTable:
    """Return the table after a person returned devices to service.

    Args:
        uuids: the UUIDs of MIG devices, and of GPUs together with their MIG devices.
    """
    meant = [each for uuid in uuids for each in (uuid, *table.of_gpu(uuid)) if each in table.places]
    return _stepped(table, dict.fromkeys(meant), Clear(), now, rules)


# -- samples -----------------------------------------------------------------------------------


def after_sample(table: HealthTable, sample: Sample, now: Moment, rules: Rules) -> HealthTable:
    """Return the table after a sample of NVML."""
    there = [uuid for uuid in table.conditions if uuid not in table.gone]
    if sample.failure:
        return _stepped(table, there, Silence(sample.failure), now, rules)
    answered = {gpu.uuid: gpu for gpu in sample.gpus}
    for uuid in there:
        if not table.places[uuid].is_gpu:
            continue
        gpu = answered.get(uuid)
        if gpu is not None:
            table = _after_answer(table, gpu, sample.when, now, rules)
        elif uuid in sample.uncounted and not table.conditions[uuid].lost:
            uncounted = Lost(_UNCOUNTED, is_its_own=False)
            table = _stepped(table, table.of_gpu(uuid), uncounted, now, rules)
    return table


def _after_answer(
    table: HealthTable, gpu: GpuSample, when: float, now: Moment, rules: Rules
) -> HealthTable:
    devices = table.of_gpu(gpu.uuid)
    if gpu.lost:
        return _stepped(table, devices, Lost(gpu.lost), now, rules)
    counted = (gpu.energy_joules, gpu.ecc_uncorrected)
    if _went_back(table.counters.get(gpu.uuid, (None, None)), counted):
        gone = [uuid for uuid in table.gone if table.places[uuid].gpu == gpu.uuid]
        table = _stepped(table, [*devices, *gone], Reset(), now, rules)
    table = replace(table, counters={**table.counters, gpu.uuid: counted})
    parts = {device.uuid for device in gpu.mig}
    answer = Answer(
        pending=_first_of(_PENDING, gpu),
        failed=_first_of(_FAILED, gpu),
        asks=_asked(gpu.recovery_action),
    )
    # An answer from before the last error proves nothing.
    proven = [
        uuid
        for uuid in devices
        if (uuid == gpu.uuid or uuid in parts) and when > table.conditions[uuid].last_error
    ]
    return _stepped(table, proven, answer, now, rules)


_PENDING: Final = {
    "rows_pending": "memory rows are pending a remap",
    "channel_repair_pending": "a memory channel is pending a repair",
    "tpc_repair_pending": "a processing cluster is pending a repair",
}
_FAILED: Final = {
    "rows_failed": "memory rows could not be remapped",
    "unrepairable_memory": "it has memory that cannot be repaired",
}


def _first_of(reasons: Mapping[str, str], gpu: GpuSample) -> str:
    """Return the reason of the first flag that is set; "" if none is."""
    return next((reason for name, reason in reasons.items() if getattr(gpu, name)), "")


def _asked(action: int | None) -> str | None:
    """Return the recovery action that NVML names; draining is not a recovery of the device."""
    named = None if action is None else recovery_action(action)
    return "" if named == Action.DRAIN else named


def _went_back(
    before: tuple[float | None, int | None], now: tuple[float | None, int | None]
) -> bool:
    """Return whether a counter decreased, which only a reset causes."""
    energy, errors = before
    joules, counted = now
    if energy is not None and joules is not None and joules < energy - _TOLERANCE:
        return True
    return errors is not None and counted is not None and counted < errors


def next_sample(table: HealthTable, asked: float, rules: Rules, usual: float) -> float:
    """Return when to sample NVML next.

    Args:
        asked: when the last sample was taken.
        usual: the seconds between samples while a device is not healthy.

    Returns:
        Seconds since boot, like ``asked``; infinite if a sample would change nothing.
    """
    soonest = math.inf
    for uuid, known in table.conditions.items():
        if uuid in table.gone:
            continue
        when = due(known, rules)
        if when <= asked:  # the last sample did not decide
            when = asked + usual
        if known.silent_since is not None and known.state != HealthState.UNHEALTHY:
            # Two failures do not prove silence in between, so sample more often.
            when = min(when, asked + max(rules.patience / _LOOKS, _SOONEST))
        # Without events only samples show errors, and a lost device may be back.
        if known.unwatched or not known.state.is_allocatable:
            when = min(when, asked + usual)
        soonest = min(soonest, when)
    return soonest


def reports(table: HealthTable) -> dict[str, Condition]:
    """Return the reported conditions, by UUID: those of present devices, and of GPUs gone."""
    return {
        uuid: known
        for uuid, known in table.conditions.items()
        if uuid not in table.gone or table.places[uuid].is_gpu
    }
