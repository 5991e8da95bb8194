"""Keep the plugin from allocating devices that resource claims hold.

Rules
- The plugin announces claimed devices as unhealthy, so that the kubelet chooses others, and refuses
  a claimed device in Allocate. When the claim is unprepared, its devices become healthy again.
- The DRA service publishes the claimed devices. Before it does, and in an agent without it, the
  claims file decides: pods keep the devices of their claims while they run.
- A whole GPU is not allocated while a claim holds a part of it, and a part is not allocated while a
  claim holds the GPU.
- While the agent creates a MIG device for a claim, its UUID is unknown. Until it is known, the
  plugin allocates no MIG device of that GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Self

from hooks.config import Config
from integration.agent_errors import DeviceTaken
from integration.node.state.claims_file import held
from integration.node.state.store import State
from integration.node.values.claims import ClaimDevice
from integration.node.values.health import HealthState
from integration.node.values.resources import Device, Resource


def claimed_on(state: State, config: Config) -> Sequence[ClaimDevice]:
    """Return the devices that claims hold on this node now."""
    return held(config) if state.claimed_devices.value is None else state.claimed_devices.value


def without_claimed(resource: Resource, claimed: Sequence[ClaimDevice]) -> Resource:
    """Return the resource with its claimed devices unhealthy."""
    taken = _Taken.by(claimed)
    if not claimed or not any(map(taken.has, resource.devices)):
        return resource
    return replace(
        resource,
        devices=tuple(
            each._replace(state=HealthState.UNHEALTHY) if taken.has(each) else each
            for each in resource.devices
        ),
    )


def refuse_claimed(devices: Iterable[Device], claimed: Sequence[ClaimDevice]) -> None:
    """Check that no claim holds any of these devices.

    Raises:
        DeviceTaken: a claim holds one.
    """
    taken = _Taken.by(claimed)
    for device in devices:
        if taken.has(device) or _may_be_claimed(device, claimed):
            raise DeviceTaken(f"the device {device.uuid}", found="a resource claim holds it")


class _Taken(NamedTuple):
    """The claimed devices as sets: a node may have thousands of devices and a hundred claims."""

    devices: frozenset[str]  # UUIDs of the devices
    gpus: frozenset[str]  # UUIDs of the GPUs that they belong to

    @classmethod
    def by(cls, claimed: Sequence[ClaimDevice]) -> Self:
        return cls(
            frozenset(each.uuid for each in claimed), frozenset(each.gpu for each in claimed)
        )

    def has(self, device: Device) -> bool:
        """Whether a claim holds the device, a part of it, or its GPU."""
        uuids = {device.uuid, device.gpu}
        return device.uuid in self.gpus or not uuids.isdisjoint(self.devices)


def _may_be_claimed(device: Device, claimed: Sequence[ClaimDevice]) -> bool:
    return any(each.uuid == each.device and each.gpu == device.gpu for each in claimed)
