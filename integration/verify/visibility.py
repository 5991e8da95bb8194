"""Decide whether a container sees the right GPUs. Pure.

Rules
- A GPU is identified by its device number, whatever its node is called.
- A container with a GPU has that GPU's node and no other GPU's. A container with a MIG device has
  its GPU's node and the device's capability nodes. Control nodes come with either.
- A node must open as it does on the host. A GPU that fails on the host is not the container's
  fault.
- A container cannot open other GPUs through nodes that it creates itself: because of the device
  cgroup, the kernel refuses this with EPERM.
- A container with a GPU has the driver's libcuda, mounted or in a layer. A container without one
  has no file or node of the driver; a libcuda of another version may be from its image.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from hooks.node.inventory import Inventory
from integration.verify.probe import Number, Report

_LIBRARY: Final = "libcuda.so."


@dataclass(frozen=True, slots=True)
class ExpectedDevice:
    """A device that a container should see."""

    name: str  # for messages
    request: str  # its name in a request: the UUID
    nodes: frozenset[str]  # the device nodes that the container must have
    more: frozenset[str] = frozenset()  # further nodes of the same GPU that it may have


def expected_devices(inventory: Inventory) -> tuple[ExpectedDevice, ...]:
    """Return the devices that containers can request: whole GPUs, and MIG devices.

    Devices that are excluded, lost or without a usable node are left out.
    """
    usable, found = inventory.nodes.usable, []
    for gpu in inventory.gpus:
        more = frozenset(gpu.drm_paths)
        if gpu.excluded or gpu.lost or gpu.path not in usable or not gpu.uuid:
            continue
        if not gpu.mig:
            found.append(ExpectedDevice(f"GPU {gpu.index}", gpu.uuid, frozenset({gpu.path}), more))
            continue
        found += [
            ExpectedDevice(
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
    """Return the path of each usable node of a GPU or MIG device, by device number."""
    paths = {path for gpu in inventory.gpus for path in (gpu.path, *gpu.drm_paths)}
    paths |= {path for device in inventory.mig_devices for path in device.paths}
    return {
        (node.major, node.minor): path
        for path, node in inventory.nodes.usable.items()
        if path in paths
    }


def faults_with_gpu(
    report: Report, wanted: ExpectedDevice, inventory: Inventory, on_node: Mapping[str, int]
) -> list[str]:
    """Return what is wrong with a container that should have a device.

    Args:
        report: the container's report.
        wanted: the device.
        on_node: the errno of opening each node on the host.

    Returns:
        A phrase per fault; empty if the container is right.
    """
    known = gpu_numbers(inventory)
    seen = {known[number]: error for number, error in report.nodes.values() if number in known}
    wrong = [f"{path} is missing" for path in sorted(wanted.nodes - seen.keys())]
    others = seen.keys() - wanted.nodes - wanted.more
    wrong += [f"{path} of another device is visible" for path in sorted(others)]
    for path in sorted(wanted.nodes & seen.keys()):
        if seen[path] not in {0, on_node.get(path, 0)}:
            wrong.append(f"{path} cannot be opened: {_error_text(seen[path])}")
    wrong += _reached(report, known, wanted.nodes | wanted.more)
    if not any(name.startswith(_LIBRARY) for name in report.mounts | report.files):
        wrong.append("the driver's libcuda is missing")
    return wrong


def faults_without_gpu(report: Report, inventory: Inventory) -> list[str]:
    """Return what is wrong with a container that should have no GPU.

    Returns:
        A phrase per fault; empty if the container is right.
    """
    known = {(node.major, node.minor): path for path, node in inventory.nodes.usable.items()}
    seen = {known[number] for number, _ in report.nodes.values() if number in known}
    wrong = [f"{path} is visible" for path in sorted(seen)]
    wrong += _reached(report, gpu_numbers(inventory), frozenset())
    wrong += [f"{name} is mounted" for name in sorted(report.mounts) if name.startswith(_LIBRARY)]
    if (name := f"{_LIBRARY}{inventory.driver.version}") in report.files - report.mounts:
        wrong.append(f"{name} is visible")
    return wrong


def _reached(report: Report, known: Mapping[Number, str], allowed: frozenset[str]) -> Iterator[str]:
    for number, error in report.numbers.items():
        path = known.get(number, "")
        if path and path not in allowed and error != errno.EPERM:
            yield f"{path} can be opened by its device number ({_error_text(error)})"


def _error_text(error: int) -> str:
    return os.strerror(error).lower() if error else "it opens"
