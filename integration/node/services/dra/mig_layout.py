"""What GPUs are cut into, and could be: NVML's word, and what follows from it. Pure.

A GPU has slices of memory, eight on all of today's. A GPU instance takes some that are side by
side, by its profile, and begins where the profile may begin. A :class:`Part` is one such place: a
MIG device that could be made there, with one compute instance that fills it.

Rules
- GPU instances that are there, and were not made for a claim, stay. What overlaps one of them
  cannot be made, and what they have of a GPU's engines nobody else gets.
- Parts that overlap exclude each other, by the slices that both need. Parts that need the same
  engine, of which the GPU has one, exclude each other by that. The scheduler counts both:
  of each GPU there is a set of counters, with what is left beside the instances that stay.
- A GPU has of each thing what its largest part has, or as many parts of one profile as it can have.
- A GPU whose MIG mode can be switched without a reset, as from Hopper on, can be had whole or in
  parts: as a whole it takes all of its counters. One of Ampere is what its mode is.
- A part has a name that says all of it: ``GPU-UUID-mig-PROFILE-ID-START``. NVIDIA's driver begins
  with ``gpu-MINOR``; ours does not change when another GPU fails.

Source: NVIDIA's MIG user guide; kubernetes-sigs/dra-driver-nvidia-gpu, partitions.go (the names of
counters); Kubernetes KEP-4815.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from api.errors import one_line
from integration.node.values.claims import MEBI, PART, gpu_of, quantity

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = [
    "CAPACITIES", "Counters", "GpuParts", "Instance", "Part", "Parts", "Profile", "all_of",
    "can_switch", "capacity_of", "overlaps", "parse_name", "parse_parts", "possible",
]  # fmt: skip

CAPACITIES: Final = (
    "memory", "multiprocessors", "copyEngines", "decoders", "encoders", "jpegEngines", "ofaEngines",
)  # fmt: skip
"""The names that NVIDIA's driver has for the figures of a MIG device, in the child's order."""

_MOST_BYTES: Final = 1 << 20
_LONGEST_NAME: Final = 63
_HOPPER: Final = 9
_ADDRESSING: Final = {0: "None", 1: "HMM", 2: "ATS"}
_UPPER: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")
_PLAIN: Final = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class Profile:
    """A size that a GPU can be cut into."""

    id: int  # the driver's number of it
    name: str  # "1g.10gb"
    most: int  # how many of it the GPU can have
    # the memory slice at which it may begin, and how many it takes
    places: tuple[tuple[int, int], ...]
    figures: tuple[int, ...]  # what it has, in the order of CAPACITIES; memory in MiB


@dataclass(frozen=True, slots=True)
class Instance:
    """A GPU instance that is there: its id, its profile's, and the memory slices that it takes."""

    id: int
    profile: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class GpuParts:
    """What one GPU is cut into, and can be; nothing if it knows no MIG."""

    profiles: tuple[Profile, ...] = ()
    instances: tuple[Instance, ...] = ()  # none unless it is in MIG mode
    mode: bool = True  # whether it is


@dataclass(frozen=True, slots=True)
class Parts:
    """What NVML said."""

    gpus: Mapping[str, GpuParts] = field(default_factory=dict)  # by UUID
    # how a GPU sees the host's memory ("HMM"), by UUID, if NVML has told
    addressing: Mapping[str, str] = field(default_factory=dict)
    # of each MIG device, by its UUID, as those of a Profile
    figures: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # the GPU of each MIG device and the id of its GPU instance, by its UUID
    instance_of: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    failure: str = ""  # why there is nothing in it; "" if NVML answered

    def instance(self, uuid: str) -> Instance | None:
        """The GPU instance that a MIG device is of."""
        gpu, number = self.instance_of.get(uuid, ("", -1))
        return next((each for each in self._of(gpu) if each.id == number), None)

    def instance_at(self, part: Part) -> Instance | None:
        """The GPU instance that is just where a part is."""
        same = (part.profile, part.start)
        return next((i for i in self._of(part.gpu) if (i.profile, i.start) == same), None)

    def device_at(self, part: Part) -> str:
        """The UUID of the MIG device that is just where a part is; "" if there is none."""
        there = self.instance_at(part)
        wanted = there and (part.gpu, there.id)
        return next((uuid for uuid, its in self.instance_of.items() if its == wanted), "")

    def named(self, name: str) -> Part | None:
        """The part of a name that a GPU instance is at; None if there is none."""
        part = parse_name(name)
        there = None if part is None else self.instance_at(part)
        if part is None or there is None:
            return None
        shapes = (each.name for each in self.gpus[part.gpu].profiles if each.id == part.profile)
        return replace(part, size=there.size, shape=next(shapes, ""))

    def _of(self, gpu: str) -> tuple[Instance, ...]:
        return self.gpus.get(gpu, GpuParts()).instances


@dataclass(frozen=True, slots=True)
class Part:
    """A MIG device that could be made, or was made for a claim."""

    gpu: str  # the GPU's UUID
    profile: int  # the driver's number of its profile
    start: int  # the first of its memory slices
    size: int  # how many it takes
    shape: str = ""  # its profile's name; "" if only its name is known

    @property
    def name(self) -> str:
        """What the device is called; short enough for a label of DNS."""
        numbers = f"{self.profile}-{self.start}"
        # "1g.10gb+me" is "1g10gb-me".
        shape = _PLAIN.sub("-", self.shape.replace(".", ""))
        name = f"{self.gpu.lower()}-mig-{shape}-{numbers}"
        is_fit = bool(shape) and len(name) <= _LONGEST_NAME
        return name if is_fit else f"{self.gpu.lower()}-mig-{numbers}"


@dataclass(frozen=True, slots=True)
class Counters:
    """What a part takes of its GPU, as the scheduler counts it."""

    of: str  # the name of the set of counters
    takes: Mapping[str, str]  # how much of each counter
    left: Mapping[str, str]  # how much of each counter there is in all


def parse_name(name: str) -> Part | None:
    """The part of a name; its size is 0, as a name does not tell it. None if it is no part's."""
    found = PART.fullmatch(name)
    return found and Part(gpu_of(name), int(found[2]), int(found[3]), 0)


def overlaps(one: Part | Instance, other: Part | Instance) -> bool:
    """Whether two of one GPU need the same memory slice."""
    return one.start < other.start + other.size and other.start < one.start + one.size


def can_switch(compute_capability: str, cut: GpuParts) -> bool:
    """Whether a GPU's MIG mode can be switched without a reset."""
    major = compute_capability.partition(".")[0]
    return bool(cut.profiles) and major.isdecimal() and int(major) >= _HOPPER


def all_of(minor: int, cut: GpuParts) -> Counters:
    """What a GPU takes of its counters as a whole."""
    there = _there(cut, _left(cut, ()))
    return Counters(_set_of(minor), there, there)


def possible(
    gpu: str, minor: int, cut: GpuParts, made: Iterable[Part] = ()
) -> Iterator[tuple[Part, Profile, Counters]]:
    """What could be made of a GPU beside what stays, each as if nothing else of it were made.

    Args:
        made: what of that was made for claims, or is being made.
    """
    ours = {(part.profile, part.start) for part in made if part.gpu == gpu}
    stay = [each for each in cut.instances if (each.profile, each.start) not in ours]
    left = _left(cut, stay)
    there = _there(cut, left)
    for profile in cut.profiles:
        if any(has > rest for has, rest in zip(profile.figures, left, strict=True)):
            continue
        for start, size in profile.places:
            part = Part(gpu, profile.id, start, size, profile.name)
            if not any(overlaps(each, part) for each in stay):
                takes = {**dict(_counted(profile.figures)), **_slices(start, size)}
                yield part, profile, Counters(_set_of(minor), takes, there)


def _set_of(minor: int) -> str:
    return f"gpu-{minor}-counter-set"


def _there(cut: GpuParts, left: Iterable[int]) -> dict[str, str]:
    """The counters of a GPU, with what is left of each."""
    slices = max((sum(place) for each in cut.profiles for place in each.places), default=0)
    return {**dict(_counted(left)), **_slices(0, slices)}


def _slices(start: int, size: int) -> dict[str, str]:
    return {f"memory-slice-{n}": "1" for n in range(start, start + size)}


def _left(cut: GpuParts, stay: Iterable[Instance]) -> tuple[int, ...]:
    """The figures of a whole GPU less those of the instances that stay."""
    of = {profile.id: profile for profile in cut.profiles}
    whole = [0] * len(CAPACITIES)
    for profile in cut.profiles:
        most = max(1, profile.most)
        whole = [max(a, most * b) for a, b in zip(whole, profile.figures, strict=True)]
    for each in stay:
        if each.profile in of:
            figures = of[each.profile].figures
            whole = [max(0, a - b) for a, b in zip(whole, figures, strict=True)]
    return tuple(whole)


def _counted(figures: Iterable[int]) -> Iterator[tuple[str, str]]:
    """Counters are called as capacities, in the way of DNS; what is 0 is not counted."""
    for name, value in zip(CAPACITIES, figures, strict=True):
        if value:
            yield _UPPER.sub("-", name).lower(), _quantity_of(name, value)


def capacity_of(figures: Iterable[int]) -> dict[str, str]:
    """The capacity of a MIG device, by the names of :data:`CAPACITIES`."""
    pairs = zip(CAPACITIES, figures, strict=True)
    return {name: _quantity_of(name, value) for name, value in pairs}


def _quantity_of(name: str, value: int) -> str:
    return quantity(value * MEBI) if name == CAPACITIES[0] else str(value)


# -- NVML --------------------------------------------------------------------------------------


def parse_parts(answer: bytes | None) -> Parts:
    """The meaning of what the child printed (:mod:`integration.nvml.child_query`).

    Args:
        answer: all of its stdout; of a foreign library, so nothing of it is believed unchecked.
            None if it did not end in time.
    """
    if not answer or not answer.strip():
        return Parts(failure="NVML crashed, or took longer than nvml-timeout")
    try:
        if len(answer) > _MOST_BYTES:
            raise ValueError("it is too long")  # noqa: TRY301 - as all else that is wrong with it
        report: Any = json.loads(answer)
        if isinstance(report.get("error"), str):
            return Parts(failure=one_line(report["error"]))
        gpus, addressing, figures, instance_of = {}, {}, {}, {}
        for each in report["gpus"]:
            uuid = _uuid(each["uuid"])
            profiles = tuple(map(_profile, each["profiles"]))
            instances = tuple(Instance(*map(_number, told)) for told in each["instances"])
            gpus[uuid] = GpuParts(profiles, instances, each["mode"] is True)
            if each["addressing"] in _ADDRESSING:
                addressing[uuid] = _ADDRESSING[each["addressing"]]
            for device in each["devices"]:
                figures[_uuid(device["uuid"])] = _figures(device["figures"])
                instance_of[_uuid(device["uuid"])] = uuid, _number(device["instance"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return Parts(failure=one_line(f"NVML's answer makes no sense: {error}"))
    return Parts(gpus, addressing, figures, instance_of)


def _profile(told: Any) -> Profile:
    places = tuple((_number(start), _number(size)) for start, size in told["places"])
    numbers = _number(told["id"]), _number(told["most"])
    return Profile(numbers[0], str(told["name"]), numbers[1], places, _figures(told["figures"]))


def _figures(told: Any) -> tuple[int, ...]:
    figures = tuple(map(_number, told))
    if len(figures) != len(CAPACITIES):
        raise ValueError("other figures than were asked for")
    return figures


def _number(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError("no number")
    return value


def _uuid(value: Any) -> str:
    kind, dash, rest = str(value).partition("-")
    return f"{kind.upper()}{dash}{rest.lower()}"
