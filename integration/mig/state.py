"""Read from NVML and sysfs how the node's GPUs are partitioned, also as a configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hooks.config import Config
from hooks.node.fingerprint import read_text
from hooks.node.gpus import Gpu
from hooks.node.inventory import Inventory
from integration.mig.errors import MigUnreadable
from integration.mig.format import VERSION
from integration.mig.profiles import ProfileName
from integration.nvml.mig_parts import GpuParts, Parts, Profile, ask_parts
from integration.nvml.nvidia_smi import SmiFailed

__all__ = ["Cut", "MigGpu", "Partition", "exported", "partition_of", "read_gpus"]


@dataclass(frozen=True, slots=True, order=True)
class Cut:
    """A GPU instance and its compute instances, each of which is a MIG device."""

    start: int  # the first of its memory slices
    profile: int
    computes: tuple[int, ...]  # the slices of each compute instance, the largest first


@dataclass(frozen=True, slots=True)
class Partition:
    """How a GPU is, or should be, partitioned."""

    mode: bool  # whether it is in MIG mode
    cuts: frozenset[Cut] = frozenset()


@dataclass(frozen=True)
class MigGpu:
    """A GPU of this node."""

    gpu: Gpu
    parts: GpuParts
    now: Partition
    device: int  # the PCI device in the upper 16 bits, its vendor in the lower ones; 0 if unknown
    subsystem: int  # the same of the subsystem
    answers: bool = True  # whether NVML lists it

    def is_at(self, wanted: Partition) -> bool:
        """Return whether the GPU has this partition, and keeps it after its next reset."""
        return self.now == wanted and self.parts.pending is wanted.mode

    def at(self, partition: Partition) -> MigGpu:
        """Return the GPU as it would be with this partition."""
        parts = replace(self.parts, mode=partition.mode, pending=partition.mode)
        return replace(self, parts=parts, now=partition)

    @cached_property
    def profiles(self) -> Mapping[ProfileName, Profile]:
        """The profiles of its GPU instances, by their names."""
        named = ((ProfileName.parse(each.name), each) for each in self.parts.profiles)
        return {name: profile for name, profile in named if name is not None}

    def name_of(self, cut: Cut) -> ProfileName | None:
        """Return the name of a GPU instance; None if NVML's name for it is unknown."""
        return next((n for n, each in self.profiles.items() if each.id == cut.profile), None)

    def names(self, cuts: Iterable[Cut]) -> Counter[ProfileName]:
        """Return how many MIG devices of each profile GPU instances have."""
        return Counter(
            ProfileName(name.slices, each, name.memory, name.attributes)
            for cut in cuts
            if (name := self.name_of(cut)) is not None
            for each in cut.computes
        )


def read_gpus(config: Config, inventory: Inventory) -> tuple[MigGpu, ...]:
    """Return the GPUs of this node, by index.

    Raises:
        MigUnreadable: NVML does not answer.
    """
    try:
        parts = ask_parts(config)
    except SmiFailed as error:
        raise MigUnreadable("to ask how GPUs are partitioned", found=error.found) from error
    lost = GpuParts(mode=False, pending=False)
    return tuple(
        MigGpu(
            gpu, parts.gpus.get(gpu.uuid, lost), partition_of(parts, gpu.uuid), *_ids(config, gpu),
            gpu.uuid in parts.gpus,
        )
        for gpu in inventory.gpus
    )  # fmt: skip


def partition_of(parts: Parts, uuid: str) -> Partition:
    """Return a GPU's partition according to NVML; one without MIG if NVML does not list it."""
    gpu = parts.gpus.get(uuid)
    if gpu is None:
        return Partition(mode=False)
    computes: dict[int, list[int]] = {}
    for device, (owner, instance) in parts.instance_of.items():
        if owner == uuid:
            computes.setdefault(instance, []).append(parts.slices[device])
    return Partition(
        gpu.mode,
        frozenset(
            Cut(each.start, each.profile, tuple(sorted(computes.get(each.id, ()), reverse=True)))
            for each in gpu.instances
        ),
    )


def _ids(config: Config, gpu: Gpu) -> tuple[int, int]:
    below = f"{config.sys}/bus/pci/devices/{gpu.bus_id}"
    names = ("device", "vendor", "subsystem_device", "subsystem_vendor")
    numbers = [int(read_text(f"{below}/{name}") or "0", 0) for name in names]
    return numbers[0] << 16 | numbers[1], numbers[2] << 16 | numbers[3]


def exported(gpus: Iterable[MigGpu], label: str) -> dict[str, Any]:
    """Return the present state of the GPUs that answer, as a configuration.

    GPUs with the same state share an entry.

    Args:
        label: the layout's name.
    """
    alike: dict[tuple[int, bool, frozenset[tuple[ProfileName, int]]], list[MigGpu]] = {}
    for each in gpus:
        if not each.answers:
            continue
        counts = frozenset(each.names(each.now.cuts).items())
        alike.setdefault((each.device, each.now.mode, counts), []).append(each)
    entries = []
    for (device, mode, counts), same in alike.items():
        entry: dict[str, Any] = {
            "device-filter": [f"0x{device:08X}"],
            "devices": [each.gpu.index for each in same],
            "mig-enabled": mode,
        }
        if mode:
            entry["mig-devices"] = {str(name): n for name, n in sorted(counts, reverse=True)}
        entries.append(entry)
    return {"version": VERSION, "mig-configs": {label: entries}}
