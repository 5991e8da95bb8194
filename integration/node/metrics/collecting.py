"""What the agent knows, as values of the families.

Rules
- It is a picture of one moment: what the board had when :meth:`Moment.of` was called. What was
  counted goes on meanwhile, and only grows.
- A GPU is told of if the inventory has it; one that only NVML knows is told of by its UUID alone.
- What NVML said some time ago is not told again when it does not answer.

Source: the tables of :mod:`.families`; NVML's nvmlClocksEventReasons for the reasons of throttling.
"""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from integration.node.health.values import State
from integration.node.ledger.values import DeviceUse, Ledger
from integration.node.metrics import families as f
from integration.node.metrics.counters import FAILED, MOST, OK, REFUSED, Counters
from integration.node.metrics.text import Row
from integration.node.refresh import Seen
from shim import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hooks.node.gpus import Gpu
    from integration.inspection.bundles import Container
    from integration.node.board import Board
    from integration.node.health.values import DeviceHealth
    from integration.node.metrics.families import Family
    from integration.node.monitor.values import GpuSample, Sample
    from integration.node.mps.values import MpsDaemon
    from integration.node.plugin.values import Resource

__all__ = ["REASONS", "Moment", "collect"]

Series = tuple["Family", "Iterable[Row]"]
Names = tuple[str, ...]
K = TypeVar("K", bound=tuple[str, ...])

REASONS: Final = (
    (0x1, "gpu_idle"),
    (0x2, "applications_clocks_setting"),
    (0x4, "sw_power_cap"),
    (0x8, "hw_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "sw_thermal_slowdown"),
    (0x40, "hw_thermal_slowdown"),
    (0x80, "hw_power_brake_slowdown"),
    (0x100, "display_clock_setting"),
)
"""NVML's bits of why clocks are low."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What the agent knows at one moment.

    Attributes:
        boot: when the node was booted, in seconds since the epoch.
        sample: what NVML said for this scrape; None if it was not asked.
        waited: seconds until it did.
        parts: the names of the agent's parts.
        The others are the board's.
    """

    boot: float
    seen: Seen = field(default_factory=Seen)
    sample: Sample | None = None
    waited: float = 0.0
    unwatched: Mapping[str, str] = field(default_factory=dict)
    health: Mapping[str, DeviceHealth] = field(default_factory=dict)
    xids: Mapping[tuple[str, int, str], int] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    usage: tuple[DeviceUse, ...] = ()
    resources: tuple[Resource, ...] = ()
    mps: Mapping[str, MpsDaemon] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    counters: Counters = field(default_factory=Counters)

    @classmethod
    def of(
        cls, board: Board, *, boot: float, sample: Sample | None, waited: float, parts: Names
    ) -> Moment:
        """What the board has now."""
        return cls(
            boot=boot,
            seen=board.seen,
            sample=sample,
            waited=waited,
            unwatched=board.unwatched,
            health=board.health,
            xids=board.xids,
            ledger=board.ledger,
            usage=board.usage,
            resources=board.resources,
            mps=board.mps,
            faults=board.faults,
            parts=parts,
            counters=board.counters,
        )

    @property
    def answered(self) -> bool:
        """Whether NVML did."""
        return self.sample is not None and not self.sample.failure


def collect(moment: Moment) -> Iterator[Series]:
    """All that is known, family by family.

    Args:
        moment: when.
    """
    names = _Names(moment)
    yield from _agent(moment)
    yield from _gpus(moment, names)
    yield from _samples(moment, names)
    yield from _xids(moment, names)
    yield from _health(moment, names)
    yield from _containers(moment, names)
    yield from _plugin(moment)


class _Names:
    """What devices are called, by their UUIDs."""

    def __init__(self, moment: Moment) -> None:
        inventory = moment.seen.inventory
        self.gpus: dict[str, Gpu] = {}
        self.gpu: dict[str, Names] = {}
        self.mig: dict[str, Names] = {}
        self.device: dict[str, Names] = {}
        if inventory is not None:
            by_index = {gpu.index: gpu for gpu in inventory.gpus}
            for gpu in inventory.gpus:
                key = gpu.uuid or gpu.bus_id  # nobody may know it, when it is broken
                self.gpus[key] = gpu
                self.gpu[key] = (str(gpu.index), gpu.uuid, gpu.bus_id, gpu.model)
            for device in inventory.mig_devices:
                uuid = by_index[device.gpu].uuid if device.gpu in by_index else ""
                of = (str(device.gpu), uuid, str(device.index), device.uuid)
                self.device[device.uuid] = of
                self.mig[device.uuid] = (*of, device.profile)
        for sample in moment.sample.gpus if moment.sample is not None else ():
            self.gpu.setdefault(sample.uuid, ("", sample.uuid, "", ""))
            for part in sample.mig:
                self.device.setdefault(part.uuid, ("", sample.uuid, "", part.uuid))
                self.mig.setdefault(part.uuid, ("", sample.uuid, "", part.uuid, ""))
        for uuid, known in self.gpu.items():
            self.device[uuid] = (known[0], known[1], "", "")

    def of(self, uuid: str) -> Names:
        """The labels of a GPU or MIG device, also of one that is gone."""
        gone = ("", "", "", uuid) if uuid.startswith("MIG-") else ("", uuid, "", "")
        return self.device.get(uuid, gone)


# -- the agent --------------------------------------------------------------------------------


def _agent(moment: Moment) -> Iterator[Series]:
    seen, counters = moment.seen, moment.counters
    yield f.BUILD, [Row((VERSION, platform.python_version()), 1)]
    if seen.driver:
        cuda = seen.inventory.cuda_version if seen.inventory is not None else ""
        yield f.DRIVER, [Row((seen.driver, cuda), 1)]
    yield f.NVML_UP, [Row((), moment.answered)]
    if moment.sample is not None:
        yield f.NVML_WAIT, [Row((), moment.waited)]
        if moment.answered:
            yield f.NVML_TIME, [Row((), round(moment.boot + moment.sample.when, 3))]
            yield f.NVML_DOUBTS, [Row((), len(moment.sample.notes))]
    yield f.LOOKS, _counted(counters.looks)
    yield f.LOOKING, [Row((), counters.looking)]
    if counters.last_look is not None:
        yield f.LAST_LOOK, [Row((), round(moment.boot + counters.last_look, 3))]
    yield f.NODE_FAULTS, [Row((), len(seen.faults))]
    parts = dict.fromkeys((*moment.parts, *moment.faults))
    yield f.PART_UP, [Row((part,), part not in moment.faults) for part in parts]
    restarts = {(part,): 0 for part in moment.parts} | counters.restarts
    yield f.PART_RESTARTS, _counted(restarts)


def _counted(counted: Mapping[K, int]) -> list[Row]:
    return [Row(key, count) for key, count in counted.items()]


# -- GPUs -------------------------------------------------------------------------------------


def _gpus(moment: Moment, names: _Names) -> Iterator[Series]:
    yield f.GPU_INFO, [
        Row(
            (
                *names.gpu[key], str(gpu.minor), _word(gpu.mig), gpu.compute_capability,
                gpu.brand, _word(gpu.excluded),
            ),
            1,
        )
        for key, gpu in names.gpus.items()
    ]  # fmt: skip
    if moment.answered:
        assert moment.sample is not None  # noqa: S101 - that is what answered says
        lost = {each.uuid for each in moment.sample.gpus if each.lost}
        there = {each.uuid for each in moment.sample.gpus} - lost
        yield f.GPU_UP, [Row(labels, uuid in there) for uuid, labels in names.gpu.items()]
    yield (
        f.GPU_WATCHED,
        [
            Row(labels, moment.unwatched.keys().isdisjoint({"", uuid}))
            for uuid, labels in names.gpu.items()
        ],
    )
    inventory = moment.seen.inventory
    if inventory is not None:
        yield (
            f.MIG_INFO,
            [
                Row((*names.mig[each.uuid], str(each.gpu_instance), str(each.compute_instance)), 1)
                for each in inventory.mig_devices
            ],
        )


def _word(yes: bool) -> str:  # noqa: FBT001 - it is what is written
    return "true" if yes else "false"


_OF_SAMPLE: Final = (
    (f.GPU_MEMORY_TOTAL, lambda s: s.memory_total_bytes),
    (f.GPU_MEMORY_USED, lambda s: s.memory_used_bytes),
    (f.GPU_BUSY, lambda s: _ratio(s.gpu_percent)),
    (f.GPU_MEMORY_BUSY, lambda s: _ratio(s.memory_percent)),
    (f.GPU_ENCODER, lambda s: _ratio(s.encoder_percent)),
    (f.GPU_DECODER, lambda s: _ratio(s.decoder_percent)),
    (f.GPU_POWER, lambda s: s.power_watts),
    (f.GPU_ENERGY, lambda s: s.energy_joules),
    (f.GPU_TEMPERATURE, lambda s: s.temperature_celsius),
    (f.GPU_SM_CLOCK, lambda s: s.sm_clock_hz),
    (f.GPU_MEMORY_CLOCK, lambda s: s.memory_clock_hz),
    (f.GPU_ROWS_PENDING, lambda s: s.rows_pending),
    (f.GPU_ROWS_FAILED, lambda s: s.rows_failed),
)


def _ratio(percent: int | None) -> float | None:
    return None if percent is None else percent / 100


def _samples(moment: Moment, names: _Names) -> Iterator[Series]:
    if moment.sample is None or moment.sample.failure:
        return
    gpus = [each for each in moment.sample.gpus if not each.lost]
    for family, value in _OF_SAMPLE:
        told = ((names.gpu[each.uuid], value(each)) for each in gpus)
        yield family, [Row(labels, known) for labels, known in told if known is not None]
    yield f.GPU_THROTTLED, list(_throttled(gpus, names))
    yield f.GPU_ECC, [
        Row((*names.gpu[each.uuid], kind), count)
        for each in gpus
        for kind, count in (
            ("corrected", each.ecc_corrected), ("uncorrected", each.ecc_uncorrected),
        )
        if count is not None
    ]  # fmt: skip
    parts = [part for each in gpus for part in each.mig]
    yield (
        f.MIG_MEMORY_TOTAL,
        [
            Row(names.mig[part.uuid], part.memory_total_bytes)
            for part in parts
            if part.memory_total_bytes is not None
        ],
    )
    yield (
        f.MIG_MEMORY_USED,
        [
            Row(names.mig[part.uuid], part.memory_used_bytes)
            for part in parts
            if part.memory_used_bytes is not None
        ],
    )


def _throttled(gpus: Iterable[GpuSample], names: _Names) -> Iterator[Row]:
    for each in gpus:
        if each.throttle_reasons is not None:
            for bit, reason in REASONS:
                labels = (*names.gpu[each.uuid], reason)
                yield Row(labels, bool(each.throttle_reasons & bit))


def _xids(moment: Moment, names: _Names) -> Iterator[Series]:
    counted: dict[Names, int] = defaultdict(int)
    for number, ((uuid, xid, title), count) in enumerate(moment.xids.items()):
        # Beyond so many it is not told whose they were; they are counted all the same.
        whose = _of_title(title if number < MOST else "")
        counted[(*names.of(uuid)[:2], str(xid), *whose)] += count
    yield f.GPU_XIDS, _counted(counted)
    yield (
        f.GPU_LAST_XID,
        [
            Row((*names.of(uuid)[:2], xid), round(moment.boot + when, 3))
            for (uuid, xid), when in moment.counters.last_xids.items()
        ],
    )


def _of_title(title: str) -> Names:
    """Namespace, pod and container of what people call it."""
    parts = title.split("/")
    return tuple(parts) if len(parts) == len(("namespace", "pod", "name")) else ("", "", title)


# -- health -----------------------------------------------------------------------------------


def _health(moment: Moment, names: _Names) -> Iterator[Series]:
    health = moment.health
    yield (
        f.HEALTH,
        [
            Row((*names.of(uuid), state.value), each.state is state)
            for uuid, each in health.items()
            for state in State
        ],
    )
    yield (
        f.HEALTH_SINCE,
        [Row(names.of(uuid), each.since) for uuid, each in health.items() if each.since],
    )
    yield f.HEALTH_XID, [Row(names.of(uuid), each.xid) for uuid, each in health.items()]
    held: dict[str, int] = dict.fromkeys(names.device, 0)
    for holding in moment.ledger.holdings:
        for uuid in {*holding.devices, *holding.gpus}:
            held[uuid] = held.get(uuid, 0) + 1
    yield f.HOLDERS, [Row(names.of(uuid), count) for uuid, count in held.items()]


# -- containers -------------------------------------------------------------------------------


def _names_of(container: Container) -> Names:
    if container.pod is None:
        return ("", "", container.name or container.id)
    return (container.pod.namespace, container.pod.name, container.name or container.id)


def _containers(moment: Moment, names: _Names) -> Iterator[Series]:
    holdings = moment.ledger.holdings
    titles = [_names_of(each.container) for each in holdings]
    yield f.CONTAINER_INFO, list({
        labels: Row(labels, 1)
        for labels in (
            (*title, each.container.id, each.container.namespace)
            for title, each in zip(titles, holdings, strict=True)
        )
    }.values())  # fmt: skip
    stale: dict[Names, bool] = defaultdict(bool)
    orphan: dict[Names, bool] = defaultdict(bool)
    devices: dict[Names, bool] = {}
    for title, each in zip(titles, holdings, strict=True):
        stale[title] |= bool(each.stale)
        orphan[title] |= bool(each.orphan)
        devices |= dict.fromkeys(((*title, *names.of(uuid)) for uuid in each.devices), True)
    yield f.CONTAINER_STALE, _flags(stale)
    yield f.CONTAINER_ORPHAN, _flags(orphan)
    missing: Counter[Names] = Counter(
        (m.namespace, m.pod, m.container) for m in moment.ledger.missing
    )
    known = dict.fromkeys((*titles, *missing))
    yield f.CONTAINER_MISSING, [Row(title, missing[title]) for title in known]
    yield f.CONTAINER_DEVICE, _flags(devices)
    if moment.answered:
        yield from _usage(moment, names)
    yield f.UNREADABLE, [Row((), len(moment.ledger.unknown))]


def _flags(flags: Mapping[Names, bool]) -> list[Row]:
    return [Row(labels, value) for labels, value in flags.items()]


_OF_USE: Final = (
    (f.USE_MEMORY, lambda u: u.memory_bytes),
    (f.USE_SM, lambda u: _ratio(u.sm_percent)),
    (f.USE_MEMORY_BUSY, lambda u: _ratio(u.memory_percent)),
    (f.USE_ENCODER, lambda u: _ratio(u.encoder_percent)),
    (f.USE_DECODER, lambda u: _ratio(u.decoder_percent)),
    (f.USE_ENERGY, lambda u: u.energy_joules),
    (f.USE_PROCESSES, lambda u: len(u.processes)),
)
_OF_OUTSIDE: Final = (
    (f.OUTSIDE_MEMORY, lambda u: u.memory_bytes),
    (f.OUTSIDE_PROCESSES, lambda u: len(u.processes)),
)


def _usage(moment: Moment, names: _Names) -> Iterator[Series]:
    """What is used of each device. Two containers of one name are told of as one."""
    inside = [
        ((*_names_of(use.holding.container), *names.of(use.device)), use)
        for use in moment.usage
        if use.holding is not None
    ]
    outside = [(names.of(use.device), use) for use in moment.usage if use.holding is None]
    for family, value in _OF_USE:
        sums: dict[Names, float] = {}
        for labels, use in inside:
            amount = value(use)
            if amount is not None:
                sums[labels] = sums.get(labels, 0) + amount
        yield family, [Row(labels, amount) for labels, amount in sums.items()]
    for family, value in _OF_OUTSIDE:
        told = ((labels, value(use)) for labels, use in outside)
        yield family, [Row(labels, amount) for labels, amount in told if amount is not None]


# -- the device plugin ------------------------------------------------------------------------


def _plugin(moment: Moment) -> Iterator[Series]:
    resources, counters = moment.resources, moment.counters
    yield (
        f.RESOURCE,
        [Row((each.name, each.original or each.name, each.sharing), 1) for each in resources],
    )
    yield f.RESOURCE_REPLICAS, [Row((each.name,), each.replicas) for each in resources]
    yield (
        f.RESOURCE_DEVICES,
        [
            Row((each.name, state.value), sum(device.state is state for device in each.devices))
            for each in resources
            for state in State
        ],
    )
    unheld = Counter(each.resource for each in moment.ledger.unheld)
    yield (
        f.UNHELD,
        [
            Row((name,), unheld[name])
            for name in dict.fromkeys((*(r.name for r in resources), *unheld))
        ],
    )
    yield f.MPS_UP, [Row((each.resource,), not each.unready) for each in moment.mps.values()]
    yield f.MPS_RESTARTS, [Row((each.resource,), each.restarts) for each in moment.mps.values()]
    # What has not happened yet is 0, or its first time would not be seen as an increase.
    never = {(each.name, result): 0 for each in resources for result in (OK, REFUSED, FAILED)}
    yield f.REGISTRATIONS, _counted(never | counters.registrations)
    yield f.UPDATES, _counted({(each.name,): 0 for each in resources} | counters.updates)
    yield f.ALLOCATIONS, _counted(never | counters.allocations)
    yield f.ALLOCATING, [Row(key, taken) for key, taken in counters.allocating.items()]
