"""MIG layout: how GPUs are divided, how they could be, and the resulting counters. Pure.

A GPU has memory slices, eight on all present models. A GPU instance uses adjacent slices; its
profile says how many, and where it may start. A :class:`Part` is one such place: a MIG device that
the driver can create there, with one compute instance that fills it.

Rules
- GPU instances that exist and were not created for a claim stay. No part may overlap them, and
  their engines are not available to others.
- Parts that overlap exclude each other by the slices that both need. Parts that need an engine
  which the GPU has only once exclude each other by that engine. The scheduler counts both: each GPU
  has a counter set with what the existing instances leave over.
- The total of a counter is what the largest part needs, or as many parts of one profile as fit.
- From Hopper on, the MIG mode of a GPU can be switched without a reset, so the GPU can be allocated
  whole or in parts. As a whole it consumes all of its counters. An Ampere GPU keeps its mode.
- The name of a part contains everything about it: ``GPU-UUID-mig-PROFILE-ID-START``. NVIDIA's
  driver starts with ``gpu-MINOR`` instead, which changes when another GPU fails.

Source: NVIDIA's MIG user guide; kubernetes-sigs/dra-driver-nvidia-gpu, partitions.go (the names of
counters); Kubernetes KEP-4815.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from integration.node.values.claims import MEBI, PART, gpu_of, quantity
from integration.nvml.mig_parts import (
    CAPACITIES,
    GpuParts,
    Instance,
    Parts,
    Place,
    Profile,
    overlaps,
)

__all__ = [
    "Counters", "Part", "all_of", "can_switch", "capacity_of", "parse_name", "part_named",
    "possible",
]  # fmt: skip

_LONGEST_NAME: Final = 63
_HOPPER: Final = 9
_UPPER: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")
_PLAIN: Final = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class Part(Place):
    """A place for a MIG device that the driver can create, or created for a claim."""

    shape: str = ""  # the profile's name; "" if unknown

    @property
    def name(self) -> str:
        """The device's name; it fits into a DNS label."""
        numbers = f"{self.profile}-{self.start}"
        # "1g.10gb+me" is "1g10gb-me".
        shape = _PLAIN.sub("-", self.shape.replace(".", ""))
        name = f"{self.gpu.lower()}-mig-{shape}-{numbers}"
        is_fit = bool(shape) and len(name) <= _LONGEST_NAME
        return name if is_fit else f"{self.gpu.lower()}-mig-{numbers}"

    def is_called(self, name: str) -> bool:
        """Return whether a device's name is for this place, with or without the profile's name."""
        other = parse_name(name)
        place = (self.gpu, self.profile, self.start)
        return other is not None and (other.gpu, other.profile, other.start) == place


@dataclass(frozen=True, slots=True)
class Counters:
    """What a device consumes of its GPU's counters, for the scheduler."""

    of: str  # the name of the counter set
    takes: Mapping[str, str]  # consumption by counter
    left: Mapping[str, str]  # the total of each counter


def parse_name(name: str) -> Part | None:
    """Return the part with a name, or None. Its size is 0, since the name does not contain it."""
    found = PART.fullmatch(name)
    return found and Part(gpu_of(name), int(found[2]), int(found[3]), 0)


def part_named(parts: Parts, name: str) -> Part | None:
    """Return the part with a name if a GPU instance exists there; else None."""
    part = parse_name(name)
    there = None if part is None else parts.instance_at(part)
    if part is None or there is None:
        return None
    shapes = (each.name for each in parts.gpus[part.gpu].profiles if each.id == part.profile)
    return replace(part, size=there.size, shape=next(shapes, ""))


def can_switch(compute_capability: str, cut: GpuParts) -> bool:
    """Return whether a GPU's MIG mode can be switched without a reset."""
    major = compute_capability.partition(".")[0]
    return bool(cut.profiles) and major.isdecimal() and int(major) >= _HOPPER


def all_of(minor: int, cut: GpuParts) -> Counters:
    """Return the counters of a whole GPU, which consumes all of them."""
    there = _there(cut, _left(cut, ()))
    return Counters(_set_of(minor), there, there)


def possible(
    gpu: str, minor: int, cut: GpuParts, made: Iterable[Part] = ()
) -> Iterator[tuple[Part, Profile, Counters]]:
    """Yield all MIG devices that fit next to the instances that stay.

    Args:
        made: the parts that were, or are being, created for claims; these do not stay.
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
    """Return the counters of a GPU with their totals."""
    slices = max((sum(place) for each in cut.profiles for place in each.places), default=0)
    return {**dict(_counted(left)), **_slices(0, slices)}


def _slices(start: int, size: int) -> dict[str, str]:
    return {f"memory-slice-{n}": "1" for n in range(start, start + size)}


def _left(cut: GpuParts, stay: Iterable[Instance]) -> tuple[int, ...]:
    """Return the figures of a GPU without those of the instances that stay."""
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
    """Yield counters: capacities with names that fit into DNS labels, without zeros."""
    for name, value in zip(CAPACITIES, figures, strict=True):
        if value:
            yield _UPPER.sub("-", name).lower(), _quantity_of(name, value)


def capacity_of(figures: Iterable[int]) -> dict[str, str]:
    """Return the capacity of a MIG device, by the names of :data:`CAPACITIES`."""
    pairs = zip(CAPACITIES, figures, strict=True)
    return {name: _quantity_of(name, value) for name, value in pairs}


def _quantity_of(name: str, value: int) -> str:
    return quantity(value * MEBI) if name == CAPACITIES[0] else str(value)
