"""Refuse plans with a device node of an excluded GPU.

Plans from the inventory have none (:mod:`hooks.node.gpus`), but other sources, such as a foreign
CDI file, may name one. So this module checks the final plan for nodes of every vendor's excluded
GPUs. A container keeps access that it has without us, because it is privileged or its spec lists
the node.

Source: procfs and sysfs, as in :mod:`hooks.node.gpus`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

from hooks.config import Config
from hooks.errors import GpuExcluded
from hooks.node.capabilities import FRONTEND
from hooks.node.device_nodes import CAPS, cap_minors, read_majors
from hooks.node.fingerprint import Fingerprint, read_names
from hooks.node.gpus import find_gpus, mark_excluded
from hooks.node.inventory import Inventory
from hooks.plan import Device
from hooks.vendors import amd


def refuse_excluded(devices: Iterable[Device], config: Config, inventory: Inventory | None) -> None:
    """Refuse planned nodes of excluded GPUs.

    Args:
        inventory: what the node has; None if it was not read.

    Raises:
        GpuExcluded: the plan has such a node.
    """
    if not config.excluded_gpus:
        return
    usable = inventory.nodes.usable.values() if inventory is not None else ()
    known = {(node.major, node.minor) for node in usable}
    planned = [d for d in devices if d.kind == "c" and (d.major, d.minor) not in known]
    if not planned:
        return
    forbidden = excluded_numbers(config, inventory)
    for device in planned:
        owner = forbidden.get((device.major, device.minor))
        if owner is not None:
            raise GpuExcluded(
                f"{device.path} ({device.reason or 'of a CDI file'})",
                found=f"it is a node of {owner}, which exclude-gpus excludes",
                do="name another device, or make the CDI file without it",
            )


def excluded_numbers(config: Config, inventory: Inventory | None) -> dict[tuple[int, int], str]:
    """Return the excluded GPUs by the major and minor numbers of their nodes.

    Args:
        inventory: what the node has; None if it was not read.
    """
    return dict(_numbers(config, inventory)) if config.excluded_gpus else {}


def _numbers(config: Config, inventory: Inventory | None) -> Iterator[tuple[tuple[int, int], str]]:
    """Yield the numbers of all nodes of excluded GPUs, each with its GPU."""
    if inventory is not None:
        gpus = inventory.gpus
    else:
        found = find_gpus(Fingerprint("/"), config, None).gpus
        gpus, _ = mark_excluded(found, config.excluded_gpus)
    majors = read_majors(config)
    excluded = [gpu for gpu in gpus if gpu.excluded]
    caps = cap_minors(config) if excluded else {}
    for gpu in excluded:
        for driver in FRONTEND:
            if driver in majors:
                yield (majors[driver], gpu.minor), str(gpu)
        for name, minor in caps.items():
            if name.startswith(f"gpu{gpu.minor}/") and CAPS[0] in majors:
                yield (majors[CAPS[0]], minor), str(gpu)
    # For another vendor's GPU, sysfs has only the address.
    addresses = {gpu.bus_id: str(gpu) for gpu in excluded}
    addresses |= {name: f"the GPU at {name}" for name in config.excluded_gpus if ":" in name}
    nodes = [
        (name, owner)
        for address, owner in addresses.items()
        for name in read_names(f"{config.sys}/bus/pci/devices/{address}/drm") or ()
    ]
    for name, owner in (*nodes, *_of_partitions(config, addresses)):
        try:
            number = os.stat(f"{config.dev}/dri/{name}").st_rdev
        except OSError:
            continue
        yield (os.major(number), os.minor(number)), owner


def _of_partitions(config: Config, owners: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the DRM nodes of AMD's GPUs, whose first partition alone is a PCI device."""
    for gpu in amd.find(config)[0]:
        if gpu.address in owners:
            for name in gpu.device.minors:
                yield name, owners[gpu.address]
