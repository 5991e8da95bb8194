"""What a container sees of the GPUs, and what is wrong with that. Pure.

Rules
- A GPU is known by its device number, whatever its node is called.
- A container with a GPU has the GPU's node and no other GPU's; a MIG device's has its GPU's node
  and its own capability nodes. Control nodes come with any of them.
- A node opens as it does on the node itself. So a GPU that fails there is not the container's.
- What a container was not given it cannot open by a node of its own making either: the kernel
  refuses with EPERM, which is the device controller's word.
- It has the driver's libcuda, mounted. A container without a GPU has nothing of the driver.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hooks.node.inventory import Inventory
    from integration.verify.program import Number, Report

_LIBRARY: Final = "libcuda.so."


@dataclass(frozen=True, slots=True)
class Wanted:
    """The device that a container is to have."""

    name: str  # what people call it
    request: str  # what it is asked for by
    nodes: frozenset[str]  # those that the container must have, by their paths in it
    more: frozenset[str] = frozenset()  # those that it may have besides, of the same GPU


def wanted_of(inventory: Inventory) -> tuple[Wanted, ...]:
    """The devices of a node that containers can have: whole GPUs, and MIG devices of the others.

    Those that are excluded, lost, or without a usable node are left out.
    """
    usable, found = inventory.nodes.usable, []
    for gpu in inventory.gpus:
        more = frozenset(gpu.drm_paths)
        if gpu.excluded or gpu.lost or gpu.path not in usable or not gpu.uuid:
            continue
        if not gpu.mig:
            found.append(Wanted(f"GPU {gpu.index}", gpu.uuid, frozenset({gpu.path}), more))
            continue
        found += [
            Wanted(
                f"MIG device {gpu.index}:{device.index}",
                device.uuid,
                frozenset({gpu.path, *device.paths}),
                more,
            )
            for device in inventory.mig_devices
            if device.gpu == gpu.index
        ]
    return tuple(found)


def gpu_numbers(inventory: Inventory) -> dict[Number, str]:
    """The usable nodes that are one GPU's or MIG device's: the path of each by its number."""
    paths = {path for gpu in inventory.gpus for path in (gpu.path, *gpu.drm_paths)}
    paths |= {path for device in inventory.mig_devices for path in device.paths}
    return {
        (node.major, node.minor): path
        for path, node in inventory.nodes.usable.items()
        if path in paths
    }


def wrong_with(
    report: Report, wanted: Wanted, inventory: Inventory, on_node: Mapping[str, int]
) -> list[str]:
    """What is wrong with a container that is to have a device.

    Args:
        report: of the container.
        wanted: the device.
        on_node: what opening nodes on the node itself says, as errno.

    Returns:
        For people; empty if nothing is.
    """
    known = gpu_numbers(inventory)
    seen = {known[number]: error for number, error in report.nodes.values() if number in known}
    wrong = [f"no node {path}" for path in sorted(wanted.nodes - seen.keys())]
    others = seen.keys() - wanted.nodes - wanted.more
    wrong += [f"the node {path} of another device" for path in sorted(others)]
    for path in sorted(wanted.nodes & seen.keys()):
        if seen[path] not in {0, on_node.get(path, 0)}:
            wrong.append(f"{path} cannot be opened: {_words(seen[path])}")
    wrong += _reached(report, known, wanted.nodes | wanted.more)
    if not any(name.startswith(_LIBRARY) for name in report.mounts):
        wrong.append("no libcuda of the driver")
    return wrong


def wrong_without(report: Report, inventory: Inventory) -> list[str]:
    """What is wrong with a container that is to have nothing.

    Returns:
        As :func:`wrong_with`.
    """
    known = {(node.major, node.minor): path for path, node in inventory.nodes.usable.items()}
    seen = {known[number] for number, _ in report.nodes.values() if number in known}
    wrong = [f"the node {path}" for path in sorted(seen)]
    wrong += _reached(report, gpu_numbers(inventory), frozenset())
    wrong += [name for name in sorted(report.mounts) if name.startswith(_LIBRARY)]
    return wrong


def _reached(report: Report, known: Mapping[Number, str], allowed: frozenset[str]) -> Iterator[str]:
    for number, error in report.numbers.items():
        path = known.get(number, "")
        if path and path not in allowed and error != errno.EPERM:
            yield f"{path} can be reached by its number ({_words(error)})"


def _words(error: int) -> str:
    return os.strerror(error).lower() if error else "it opens"
