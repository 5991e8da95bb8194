"""MIG as NVML describes it: the profiles of each GPU and their places, instances and devices.

A GPU has memory slices, eight on all present models. A GPU instance uses adjacent slices; its
profile determines how many, and where it may start. A MIG device is a compute instance in a GPU
instance.

Source: NVIDIA's MIG user guide.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from api.errors import NvshimError, one_line
from hooks.config import Config
from hooks.node.gpus import Gpu
from integration.nvml.nvidia_smi import SmiFailed
from integration.nvml.query import ask_nvml

__all__ = [
    "CAPACITIES", "GpuParts", "Instance", "Parts", "Place", "Profile", "ask_parts", "overlaps",
    "parse_parts",
]  # fmt: skip

CAPACITIES: Final = (
    "memory", "multiprocessors", "copyEngines", "decoders", "encoders", "jpegEngines", "ofaEngines",
)  # fmt: skip
"""NVIDIA's names for the capacities of a MIG device, in the order of the NVML child."""

_MOST_BYTES: Final = 1 << 20
_ADDRESSING: Final = {0: "None", 1: "HMM", 2: "ATS"}


@dataclass(frozen=True, slots=True)
class Profile:
    """A GPU instance profile."""

    id: int  # the driver's number
    name: str  # "1g.10gb"
    most: int  # how many instances the GPU can have
    # each first memory slice that it may have, with the number of slices
    places: tuple[tuple[int, int], ...]
    figures: tuple[int, ...]  # in the order of CAPACITIES; memory in MiB


@dataclass(frozen=True, slots=True)
class Instance:
    """An existing GPU instance: its id, its profile's id, and its memory slices."""

    id: int
    profile: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class GpuParts:
    """The profiles and instances of one GPU; empty if it does not support MIG."""

    profiles: tuple[Profile, ...] = ()
    instances: tuple[Instance, ...] = ()  # empty unless it is in MIG mode
    mode: bool = True  # whether it is in MIG mode
    pending: bool = True  # whether it is in MIG mode after its next reset


@dataclass(frozen=True, slots=True)
class Place:
    """A place for a GPU instance."""

    gpu: str  # the GPU's UUID
    profile: int
    start: int  # the first of its memory slices
    size: int  # the number of memory slices


@dataclass(frozen=True, slots=True)
class Parts:
    """NVML's answer about all GPUs."""

    gpus: Mapping[str, GpuParts] = field(default_factory=dict)  # by UUID
    # how a GPU accesses host memory ("HMM"), by UUID, if known
    addressing: Mapping[str, str] = field(default_factory=dict)
    # of each MIG device by its UUID, as in Profile
    figures: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # GPU and GPU instance id of each MIG device, by its UUID
    instance_of: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    # the number of compute slices of each MIG device, by its UUID
    slices: Mapping[str, int] = field(default_factory=dict)
    failure: str = ""  # why it is empty; "" if NVML answered

    def instance(self, uuid: str) -> Instance | None:
        """Return the GPU instance of a MIG device."""
        gpu, number = self.instance_of.get(uuid, ("", -1))
        return next((each for each in self._of(gpu) if each.id == number), None)

    def instance_at(self, part: Place) -> Instance | None:
        """Return the GPU instance at the place of a part."""
        same = (part.profile, part.start)
        return next((i for i in self._of(part.gpu) if (i.profile, i.start) == same), None)

    def device_at(self, part: Place) -> str:
        """Return the UUID of the MIG device at the place of a part; "" if there is none."""
        there = self.instance_at(part)
        wanted = there and (part.gpu, there.id)
        return next((uuid for uuid, its in self.instance_of.items() if its == wanted), "")

    def left_out(self, gpus: Iterable[Gpu]) -> str:
        """Return the UUIDs of the GPUs that are missing from the answer, for display."""
        there = (gpu.uuid for gpu in gpus if gpu.uuid and not (gpu.lost or gpu.excluded))
        return ", ".join(uuid for uuid in there if uuid not in self.gpus)

    def _of(self, gpu: str) -> tuple[Instance, ...]:
        return self.gpus.get(gpu, GpuParts()).instances


def overlaps(one: Place | Instance, other: Place | Instance) -> bool:
    """Return whether two parts of one GPU need the same memory slice."""
    return one.start < other.start + other.size and other.start < one.start + one.size


def ask_parts(config: Config) -> Parts:
    """Ask NVML for the MIG instances of all GPUs.

    Raises:
        SmiFailed: NVML did not answer.
    """
    try:
        parts = parse_parts(ask_nvml(config, "parts"))
    except NvshimError as error:
        raise SmiFailed(f"NVML cannot be asked: {error}") from error
    if parts.failure:
        raise SmiFailed(f"NVML does not list the MIG devices: {parts.failure}")
    return parts


def parse_parts(answer: bytes | None) -> Parts:
    """Parse the output of the NVML child (:mod:`integration.nvml.child_query`).

    Args:
        answer: its stdout, which may be invalid in any way, since a foreign library produces it.
            None if the child did not exit in time.
    """
    if not answer or not answer.strip():
        return Parts(failure="NVML crashed, or took longer than nvml-timeout")
    try:
        if len(answer) > _MOST_BYTES:
            raise ValueError("it is too long")  # noqa: TRY301 - handled as other malformed answers
        report: Any = json.loads(answer)
        if isinstance(report.get("error"), str):
            return Parts(failure=one_line(report["error"]))
        gpus, addressing, figures, instance_of, slices = {}, {}, {}, {}, {}
        for each in report["gpus"]:
            uuid = _uuid(each["uuid"])
            profiles = tuple(map(_profile, each["profiles"]))
            instances = tuple(Instance(*map(_number, entry)) for entry in each["instances"])
            gpus[uuid] = GpuParts(
                profiles, instances, each["mode"] is True, each["pending"] is True
            )
            if each["addressing"] in _ADDRESSING:
                addressing[uuid] = _ADDRESSING[each["addressing"]]
            for device in each["devices"]:
                name = _uuid(device["uuid"])
                figures[name] = _figures(device["figures"])
                instance_of[name] = uuid, _number(device["instance"])
                slices[name] = _number(device["slices"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return Parts(failure=one_line(f"NVML's answer is malformed: {error}"))
    return Parts(gpus, addressing, figures, instance_of, slices)


def _profile(entry: Any) -> Profile:
    places = tuple((_number(start), _number(size)) for start, size in entry["places"])
    numbers = _number(entry["id"]), _number(entry["most"])
    return Profile(numbers[0], str(entry["name"]), numbers[1], places, _figures(entry["figures"]))


def _figures(entry: Any) -> tuple[int, ...]:
    figures = tuple(map(_number, entry))
    if len(figures) != len(CAPACITIES):
        raise ValueError("other figures than were asked for")
    return figures


def _number(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError("not a number")
    return value


def _uuid(value: Any) -> str:
    kind, dash, rest = str(value).partition("-")
    return f"{kind.upper()}{dash}{rest.lower()}"
