"""Keep the plugin from giving devices that resource claims have.

Rules
- They are unhealthy for the kubelet, so that it chooses others; one that it chooses all the same is
  refused. A claim that ends gives them back.
- The part that prepares claims tells what they have. Until it does, and in an agent without it,
  what it has written down counts: pods run on with what a claim gave them.
- A whole GPU is not given while a claim has a part of it, nor the other way round.
- While a MIG device is made for a claim nobody knows its UUID. Until then no MIG device of its GPU
  is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Self

from hooks.config import Config
from integration.agent_errors import DeviceTaken
from integration.node.state.claims_file import held
from integration.node.values.claims import ClaimDevice
from integration.node.values.health import HealthState
from integration.node.values.resources import Device, Resource

if TYPE_CHECKING:
    from integration.node.state.store import State


def claimed_on(state: State, config: Config) -> Sequence[ClaimDevice]:
    """What claims have on this node now."""
    return held(config) if state.claimed_devices.value is None else state.claimed_devices.value


def without_claimed(resource: Resource, claimed: Sequence[ClaimDevice]) -> Resource:
    """A resource of which what claims have is unhealthy."""
    taken = _Taken.by(claimed)
    if not any(map(taken.has, resource.devices)):
        return resource
    return replace(
        resource,
        devices=tuple(
            replace(each, state=HealthState.UNHEALTHY) if taken.has(each) else each
            for each in resource.devices
        ),
    )


def refuse_claimed(devices: Iterable[Device], claimed: Sequence[ClaimDevice]) -> None:
    """See that no claim has any of these.

    Raises:
        DeviceTaken: a claim has.
    """
    taken = _Taken.by(claimed)
    for device in devices:
        if taken.has(device) or _may_be_claimed(device, claimed):
            raise DeviceTaken(f"the device {device.uuid}", found="a resource claim has it")


class _Taken(NamedTuple):
    """What claims have: there may be thousands of devices, and a hundred claims."""

    devices: frozenset[str]  # UUIDs of what they have
    gpus: frozenset[str]  # and of the GPUs that those are parts of

    @classmethod
    def by(cls, claimed: Sequence[ClaimDevice]) -> Self:
        return cls(
            frozenset(each.uuid for each in claimed), frozenset(each.gpu for each in claimed)
        )

    def has(self, device: Device) -> bool:
        """Whether they have it, a part of it, or what it is a part of."""
        uuids = {device.uuid, device.gpu}
        return device.uuid in self.gpus or not uuids.isdisjoint(self.devices)


def _may_be_claimed(device: Device, claimed: Sequence[ClaimDevice]) -> bool:
    return any(each.uuid == each.device and each.gpu == device.gpu for each in claimed)
