"""What the kubelet is told of devices while it cannot be told what the node has. Pure.

A device that a kubelet is no longer told of is gone for it; one that is unhealthy only waits. So

- of a node that cannot be looked at (no driver, or in the midst of its update) every device that
  was there is unhealthy;
- while NVML does not answer, MIG devices cannot be seen; those that were there are unhealthy, and
  whole GPUs, which procfs tells of, are what they were.

Nothing of that is given to a container meanwhile: an answer to Allocate goes by the inventory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from integration.node.health.values import State

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from integration.node.plugin.values import Resource

__all__ = ["unhealthy"]


def unhealthy(resources: Iterable[Resource], but: Collection[str] = ()) -> tuple[Resource, ...]:
    """These resources, with their devices unhealthy.

    Args:
        resources: of which nothing is known now.
        but: UUIDs of devices that are left as they are.
    """
    return tuple(
        replace(
            each,
            devices=tuple(
                device if device.uuid in but else replace(device, state=State.UNHEALTHY)
                for device in each.devices
            ),
        )
        for each in resources
    )
