"""What is thought of all devices of a node, and what of it an event, a look or a sample changes.

Rules
- An error of a GPU in MIG mode is of the devices of the instance that it names. One without an
  instance, one of the whole GPU and a fatal one are of the GPU and all its MIG devices. (NVIDIA's
  plugin keeps one MIG device for each GPU, and watches that one alone.)
- An error of an instance that is not there any more, or of a GPU that nobody knows, is nobody's:
  those who might have it are suspect if it is serious, and are asked; it counts against none.
- A GPU that NVML cannot open, that it does not count, or that the node has no more, is lost, and
  its MIG devices with it. So is every device when the driver is gone. Without NVML, MIG devices are
  not known, so none is gone.
- A MIG device that is gone while its GPU is there and answers was removed on purpose: by a person,
  or after the claim that it was made for. It is forgotten. Only its own errors are remembered for a
  while, for the device that is made in its place, which may have its UUID or another.
- A MIG device that is new has the condition of its GPU, as far as that is not to be given.
- That the driver was loaded anew, and that counters of a GPU went back, is a reset. That the
  driver's files were away for a while, or that NVML has counted too few, is none.

All is pure; :mod:`integration.node.device_health.device_state` knows one device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

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
from integration.node.faults.policy import DBE, TOGETHER, XID, Policy, Verdict, severity_of
from integration.node.faults.xids import Scope, Severity, about
from integration.node.values.health import State
from shim.causes.xids import RECOVERY_ACTIONS, Action

if TYPE_CHECKING:
    from hooks.node.inventory import Inventory
    from integration.nvml.values import GpuEvent, GpuSample, Sample

_CONTAINED: Final = 94

# NVML's word for no instance.
_NO_INSTANCE: Final = 0xFFFFFFFF
# So often NVML is asked while it is silent, before all are unhealthy; seconds between two at least.
_LOOKS: Final = 4
_SOONEST: Final = 0.05
# Joules that a counter may seem to go back by, since it is told in whole millijoules.
_TOLERANCE: Final = 1.0

_GONE: Final = "the node has it no more"
_UNCOUNTED: Final = "NVML does not count it"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device is."""

    uuid: str  # its own
    gpu: str  # UUID of the GPU that it is, or is a part of
    bus_id: str = ""  # that one's PCI address
    gpu_instance: int | None = None  # of a MIG device; None for a GPU
    compute_instance: int | None = None  # likewise
    profile: str = ""  # the shape of a MIG device ("1g.10gb"); "" if it is not known

    @property
    def is_gpu(self) -> bool:
        """Whether it is a whole GPU."""
        return self.uuid == self.gpu

    def is_alike(self, other: Place) -> bool:
        """Return whether another MIG device is, or was, the same part of the same GPU.

        The driver numbers instances by where they are on the GPU.
        """
        ours, theirs = (
            (each.gpu, each.gpu_instance, each.compute_instance) for each in (self, other)
        )
        return ours == theirs and (
            self.profile == other.profile or not (self.profile and other.profile)
        )


@dataclass(frozen=True, slots=True)
class Book:
    """What is known of all devices."""

    places: Mapping[str, Place] = field(default_factory=dict)  # where each is or was, by UUID
    # what is known of each, likewise
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()  # those that are not there now
    load: str = ""  # which loading of the driver it was ("" for none yet)
    # what each GPU had counted: joules, and uncorrected errors
    counters: Mapping[str, tuple[float | None, int | None]] = field(default_factory=dict)
    # when the last contained error of each GPU was
    contained: Mapping[str, float] = field(default_factory=dict)

    def of_gpu(self, gpu: str) -> tuple[str, ...]:
        """A GPU and its MIG devices that are there.

        Args:
            gpu: its UUID.
        """
        return tuple(
            uuid for uuid, it in self.places.items() if it.gpu == gpu and uuid not in self.gone
        )

    def gpu_of(self, event: GpuEvent) -> str:
        """The UUID of the GPU that an event is of; "" if that is not known."""
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
    """A PCI address without its function, of which the kernel's log says nothing."""
    domain, _, rest = address.lower().partition(":")
    return (domain.lstrip("0"), rest.partition(".")[0])


def places_of(inventory: Inventory, known: Mapping[str, Place]) -> dict[str, Place]:
    """Where the devices of a node are.

    Args:
        known: where they were. A GPU that nobody opens has no UUID in procfs, and without NVML
            nobody knows it: then it is the one that was known at its address.
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


def _stepped(book: Book, uuids: Iterable[str], signal: Signal, now: Moment, rules: Rules) -> Book:
    conditions = dict(book.conditions)
    for uuid in uuids:
        conditions[uuid] = step(conditions.get(uuid) or Condition(), signal, now, rules)
    return replace(book, conditions=conditions)


# -- what is there -----------------------------------------------------------------------------


def saw(
    book: Book,
    places: Mapping[str, Place] | None,
    lost: Mapping[str, str],
    now: Moment,
    rules: Rules,
    *,
    load: str = "",
    complete: bool = True,
    why: str = "",
) -> Book:
    """After a look at the node.

    Args:
        places: where devices are; None if the driver is gone.
        lost: why a GPU cannot be opened, by its UUID.
        load: which loading of the driver it is; "" if that is not known.
        complete: whether all MIG devices are known.
        why: the driver is gone.
    """
    if load and book.load and load != book.load:
        book = _stepped(book, book.conditions, Reset(), now, rules)
        book = replace(book, counters={})
    book = replace(book, load=load or book.load)
    if places is None:
        there = [uuid for uuid in book.conditions if uuid not in book.gone]
        gone = Lost(f"the driver is gone: {why}", "install or load the driver", is_its_own=False)
        return _stepped(book, there, gone, now, rules)
    if complete:
        book = _without_removed(book, places, lost)
    book = _in_place(_gone(book, places, now, rules, complete=complete), places)
    conditions = dict(book.conditions)
    for uuid, place in places.items():
        if uuid not in conditions:
            of_gpu = conditions.get(place.gpu, Condition())
            conditions[uuid] = Condition() if of_gpu.state.is_given else of_gpu
    kept = {uuid: book.places[uuid] for uuid in conditions if uuid not in places}
    book = replace(
        book, places={**kept, **places}, conditions=conditions, gone=book.gone - places.keys()
    )
    return fell(book, lost, now, rules)


def fell(book: Book, lost: Mapping[str, str], now: Moment, rules: Rules) -> Book:
    """After GPUs were found lost.

    Args:
        lost: why each does not answer, by its UUID.
    """
    for gpu, reason in lost.items():
        book = _stepped(book, book.of_gpu(gpu), Lost(reason), now, rules)
    return book


def _without_removed(book: Book, places: Mapping[str, Place], lost: Mapping[str, str]) -> Book:
    """Without the MIG devices that were removed on purpose, but for their own errors."""
    removed = {
        uuid
        for uuid, place in book.places.items()
        if not (place.is_gpu or uuid in places or uuid in book.gone)
        and place.gpu in places
        and not (place.gpu in lost or book.conditions.get(place.gpu, Condition()).lost)
    }
    clean = {uuid for uuid in removed if not book.conditions[uuid].own}
    return _forgotten(replace(book, gone=book.gone | removed), clean)


def _in_place(book: Book, places: Mapping[str, Place]) -> Book:
    """With what is known of MIG devices that are gone held against those in their place."""
    others = {
        uuid
        for uuid in book.gone & places.keys()
        if not (places[uuid].is_gpu or places[uuid].is_alike(book.places[uuid]))
    }
    book = _forgotten(book, others)
    for place in places.values():
        if place.is_gpu or place.uuid in book.places:
            continue
        for uuid in book.gone - places.keys():
            if place.is_alike(book.places[uuid]):
                known = {**book.conditions, place.uuid: book.conditions[uuid]}
                there = {**book.places, place.uuid: place}
                book = _forgotten(replace(book, places=there, conditions=known), {uuid})
                break
    return book


def _forgotten(book: Book, uuids: Collection[str]) -> Book:
    return replace(
        book,
        places={uuid: place for uuid, place in book.places.items() if uuid not in uuids},
        conditions={uuid: each for uuid, each in book.conditions.items() if uuid not in uuids},
        gone=book.gone.difference(uuids),
    )


def _gone(
    book: Book, places: Mapping[str, Place], now: Moment, rules: Rules, *, complete: bool
) -> Book:
    """Without what is lost and not there any more, some time after it went."""
    missing = [
        uuid
        for uuid, place in book.places.items()
        if uuid not in places
        and uuid not in book.gone
        and (place.is_gpu or complete or place.gpu not in places)
    ]
    book = _stepped(book, missing, Lost(_GONE, "look why it is gone"), now, rules)
    book = replace(book, gone=book.gone.union(missing))
    old = {
        uuid
        for uuid in book.gone - places.keys()
        if now.boot - book.conditions[uuid].last_error > rules.longest
    }
    return _forgotten(book, old)


# -- what happens ------------------------------------------------------------------------------


def judge(book: Book, event: GpuEvent, policy: Policy) -> Verdict:
    """What an event means."""
    gpu = book.gpu_of(event)
    xid = about(event.xid) if event.kind == XID else None
    severity, remedy, over = severity_of(event, policy, book.contained.get(gpu))
    if not gpu:
        suspects = tuple(uuid for uuid in book.places if uuid not in book.gone)
        serious = severity.weight >= Severity.UNHEALTHY.weight
        capped = Severity.SUSPECT if serious else Severity.IGNORE
        return Verdict("", xid, capped, suspects if serious else (), certain=False, remedy=remedy)
    everything = book.of_gpu(gpu)
    instance = _instance(event.gpu_instance)
    whole = xid is None or xid.scope == Scope.GPU or severity == Severity.FATAL
    if whole or instance is None:
        return Verdict(gpu, xid, severity, everything, remedy=remedy, over=over)
    part = _instance(event.compute_instance)
    hit = tuple(
        uuid
        for uuid in everything
        if book.places[uuid].gpu_instance == instance
        and (part is None or book.places[uuid].compute_instance == part)
    )
    if hit:
        return Verdict(gpu, xid, severity, hit, remedy=remedy)
    capped = min(severity, Severity.SUSPECT, key=lambda each: each.weight)
    return Verdict(gpu, xid, capped, everything, certain=False, remedy=remedy)


def _instance(number: int | None) -> int | None:
    return None if number is None or number >= _NO_INSTANCE else number


def heard(book: Book, event: GpuEvent, verdict: Verdict, now: Moment, rules: Rules) -> Book:
    """After an event.

    Args:
        verdict: what it means (:func:`judge`), and who is to blame.
    """
    if event.kind == XID and event.xid == _CONTAINED and verdict.gpu:
        book = replace(book, contained={**book.contained, verdict.gpu: event.when})
        recent = [
            uuid
            for uuid in book.of_gpu(verdict.gpu)
            if abs(now.boot - book.conditions[uuid].last_error) <= TOGETHER
        ]
        book = _stepped(book, recent, Contained(DBE), now, rules)
    if verdict.over:
        book = _stepped(book, verdict.devices, Reset(), now, rules)
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
    return _stepped(book, verdict.devices, error, now, rules)


def watched(book: Book, unwatched: Mapping[str, str], now: Moment, rules: Rules) -> Book:
    """After it became known which GPUs' events cannot be had.

    Args:
        unwatched: why, by UUID of the GPU; "" stands for all.
    """
    for uuid, place in book.places.items():
        why = unwatched.get(place.gpu) or unwatched.get("") or ""
        if uuid in book.gone or book.conditions[uuid].unwatched == why:
            continue
        book = _stepped(book, [uuid], Watch(why), now, rules)
    return book


def cleared(book: Book, uuids: Iterable[str], now: Moment, rules: Rules) -> Book:
    """After a person put devices back.

    Args:
        uuids: of GPUs, whose MIG devices are put back as well, and of MIG devices.
    """
    meant = [each for uuid in uuids for each in (uuid, *book.of_gpu(uuid)) if each in book.places]
    return _stepped(book, dict.fromkeys(meant), Clear(), now, rules)


# -- what is said when they are asked ----------------------------------------------------------


def sampled(book: Book, sample: Sample, now: Moment, rules: Rules) -> Book:
    """After NVML was asked."""
    there = [uuid for uuid in book.conditions if uuid not in book.gone]
    if sample.failure:
        return _stepped(book, there, Silence(sample.failure), now, rules)
    told = {gpu.uuid: gpu for gpu in sample.gpus}
    for uuid in there:
        if not book.places[uuid].is_gpu:
            continue
        gpu = told.get(uuid)
        if gpu is not None:
            book = _told(book, gpu, sample.when, now, rules)
        elif uuid in sample.uncounted and not book.conditions[uuid].lost:
            uncounted = Lost(_UNCOUNTED, is_its_own=False)
            book = _stepped(book, book.of_gpu(uuid), uncounted, now, rules)
    return book


def _told(book: Book, gpu: GpuSample, when: float, now: Moment, rules: Rules) -> Book:
    devices = book.of_gpu(gpu.uuid)
    if gpu.lost:
        return _stepped(book, devices, Lost(gpu.lost), now, rules)
    counted = (gpu.energy_joules, gpu.ecc_uncorrected)
    if _went_back(book.counters.get(gpu.uuid, (None, None)), counted):
        gone = [uuid for uuid in book.gone if book.places[uuid].gpu == gpu.uuid]
        book = _stepped(book, [*devices, *gone], Reset(), now, rules)
    book = replace(book, counters={**book.counters, gpu.uuid: counted})
    parts = {device.uuid for device in gpu.mig}
    answer = Answer(
        pending=bool(gpu.rows_pending),
        failed=bool(gpu.rows_failed),
        asks=_asked(gpu.recovery_action),
    )
    # What was said before the last error proves nothing.
    proven = [
        uuid
        for uuid in devices
        if (uuid == gpu.uuid or uuid in parts) and when > book.conditions[uuid].last_error
    ]
    return _stepped(book, proven, answer, now, rules)


def _asked(action: int | None) -> str | None:
    """What NVML's recovery action has to be done with the device; what its users do is theirs."""
    named = None if action is None else RECOVERY_ACTIONS.get(action)
    return "" if named == Action.DRAIN else named


def _went_back(
    before: tuple[float | None, int | None], now: tuple[float | None, int | None]
) -> bool:
    """Whether a counter that only a reset takes back did go back."""
    energy, errors = before
    joules, counted = now
    if energy is not None and joules is not None and joules < energy - _TOLERANCE:
        return True
    return errors is not None and counted is not None and counted < errors


def next_sample(book: Book, asked: float, rules: Rules, usual: float) -> float:
    """When NVML is to be asked again.

    Args:
        asked: when it was asked last.
        usual: seconds between two times while something is not as it should be.

    Returns:
        Seconds since boot, as of ``asked``; infinite if nothing can become of asking.
    """
    soonest = math.inf
    for uuid, known in book.conditions.items():
        if uuid in book.gone:
            continue
        when = due(known, rules)
        if when <= asked:  # it was asked then, and did not say enough
            when = asked + usual
        if known.silent_since is not None and known.state != State.UNHEALTHY:
            # That it fails twice does not say that it was silent all the while.
            when = min(when, asked + max(rules.patience / _LOOKS, _SOONEST))
        # One of which nobody tells is asked, and one that is away: it may be back.
        if known.unwatched or not known.state.is_given:
            when = min(when, asked + usual)
        soonest = min(soonest, when)
    return soonest


def reports(book: Book) -> dict[str, Condition]:
    """What others are told, by UUID: all that is there, and GPUs that are not any more."""
    return {
        uuid: known
        for uuid, known in book.conditions.items()
        if uuid not in book.gone or book.places[uuid].is_gpu
    }
