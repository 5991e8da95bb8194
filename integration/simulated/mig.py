"""Place the MIG devices of a scenario where the driver would place them."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from integration.simulated.catalogue import MigProfile, Model
from integration.simulated.errors import invalid

_COMPUTE: Final = re.compile(r"([1-7])c", re.ASCII)


@dataclass(frozen=True, slots=True)
class ComputeInstance:
    """A compute instance: a part of a GPU instance with its own engines."""

    id: int  # its number in the GPU instance
    slices: int  # its compute slices
    start: int  # the first of them in the GPU instance
    uuid: str  # the MIG device's UUID


@dataclass(frozen=True, slots=True)
class GpuInstance:
    """A GPU instance: a part of a GPU with its own memory."""

    id: int  # the driver's number
    profile: MigProfile
    start: int  # the first memory slice
    compute: tuple[ComputeInstance, ...]  # each of them is one MIG device

    def device_name(self, compute: ComputeInstance) -> str:
        """Return ``nvidia-smi -L``'s name of a MIG device; "1c.3g.40gb" for a partial one."""
        part = "" if compute.slices == self.profile.slices else f"{compute.slices}c."
        return part + self.profile.name


def layout(model: Model, gpu: str, entries: Sequence[object]) -> tuple[GpuInstance, ...]:
    """Return the instances, with the places and numbers that the driver would give them.

    Args:
        gpu: the GPU's UUID.
        entries: profiles, each with the sizes of its compute instances ("3g.40gb/1c+2c").

    Raises:
        ScenarioInvalid: a profile does not exist, or there is no room for it.
    """
    profiles = {profile.name: profile for profile in model.profiles}
    asked = f"mig = {list(entries)} on {model.name}"
    if not profiles:
        raise invalid(asked, "the model has no MIG", "choose h100 or a100, or leave mig out")
    taken: set[int] = set()
    instances: list[GpuInstance] = []
    for entry in entries:
        name, _, parts = str(entry).partition("/")
        if (profile := profiles.get(name)) is None:
            raise invalid(asked, f"no profile {name}", f"choose from {', '.join(profiles)}")
        places = (frozenset(range(n, n + profile.memory_slices)) for n in profile.starts)
        place = next((place for place in places if not place & taken), None)
        if place is None or [i.profile for i in instances].count(profile) == profile.instances:
            raise invalid(asked, f"no room for {entry}", "list fewer, or larger ones first")
        taken |= place
        number = profile.first_id
        while number in {instance.id for instance in instances}:
            number += 1
        compute = _compute(profile, f"{gpu}/{number}", parts, asked)
        instances.append(GpuInstance(number, profile, min(place), compute))
    return tuple(instances)


def _compute(profile: MigProfile, seed: str, parts: str, asked: str) -> tuple[ComputeInstance, ...]:
    sizes = [profile.slices]
    if parts:
        matches = [_COMPUTE.fullmatch(part) for part in parts.split("+")]
        sizes = [int(match[1]) for match in matches if match is not None]
        if len(sizes) != len(matches) or sum(sizes) > profile.slices:
            raise invalid(
                asked,
                f"compute instances {parts} in {profile.name}",
                f'write sizes such as "1c+2c", in all at most {profile.slices}c',
            )
    return tuple(
        ComputeInstance(n, size, sum(sizes[:n]), f"MIG-{made_uuid(seed, n)}")
        for n, size in enumerate(sizes)
    )


def mig_entry(instance: GpuInstance) -> str:
    """Return the scenario entry of an instance; the inverse of :func:`layout`."""
    sizes = [compute.slices for compute in instance.compute]
    parts = "" if sizes == [instance.profile.slices] else "/" + "+".join(f"{n}c" for n in sizes)
    return instance.profile.name + parts


def made_uuid(seed: str, index: int) -> str:
    """Return a UUID that depends only on the arguments."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"simulated {seed} {index}"))
