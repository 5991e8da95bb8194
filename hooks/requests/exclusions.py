"""GPUs that nobody gets: those that the configuration excludes by UUID or PCI address.

Rules
- An excluded GPU stays in the inventory with its index, so that the indices of the others are
  those that nvidia-smi shows on the node. It is left out of ``all``; naming it is an error.
- None of its nodes is usable: neither its own, nor those of its MIG devices, nor those below
  /dev/dri. So nothing that is planned from the inventory can have them.
- What is not planned from the inventory (a foreign CDI file) is looked at in the end: a plan
  with a node of an excluded GPU, of whichever vendor, is refused.
- A GPU whose UUID nobody knows yet may be the one that an unmatched UUID means, and is excluded.
- What a container has without us, because it is privileged or its spec lists the node, it keeps.

Source: procfs and sysfs, as in :mod:`hooks.node.gpus`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from api.values import changed
from hooks.edits.capabilities import FRONTEND
from hooks.node.gpus import CAPS, cap_minors, find_gpus, read_majors
from hooks.node.witness import Witness
from hooks.requests.policy_errors import GpuExcluded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hooks.config import Config
    from hooks.edits.plan import Device
    from hooks.node.gpus import Gpu
    from hooks.node.inventory import Inventory

__all__ = ["excluded_numbers", "mark_excluded", "refuse_excluded"]


def mark_excluded(
    gpus: tuple[Gpu, ...], names: tuple[str, ...]
) -> tuple[tuple[Gpu, ...], list[str]]:
    """The GPUs with those marked that are excluded.

    Args:
        gpus: the node's.
        names: UUIDs and PCI addresses, as :mod:`hooks.node.gpus` writes them.

    Returns:
        The GPUs, and notes for people.
    """
    if not names:
        return gpus, []
    known = {name for gpu in gpus for name in (gpu.uuid, gpu.bus_id)}
    unmatched = [name for name in names if name not in known]
    notes = [f"{name} is to be excluded, and no GPU here is it" for name in unmatched]
    doubtful = any(name.startswith("GPU-") for name in unmatched)
    marked = []
    for gpu in gpus:
        named = gpu.uuid in names or gpu.bus_id in names
        if not named and doubtful and not gpu.uuid:
            notes.append(f"{gpu} is excluded: its UUID is not known, and may be one to exclude")
            named = True
        marked.append(changed(gpu, excluded=named))
    return tuple(marked), notes


def refuse_excluded(devices: Iterable[Device], config: Config, inventory: Inventory | None) -> None:
    """Looks for nodes of excluded GPUs among what is planned.

    Args:
        devices: what is planned.
        config: which GPUs are excluded, and where the node's files are.
        inventory: what the node has; None if it was not looked at.

    Raises:
        GpuExcluded: there is one.
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
    """The nodes of excluded GPUs.

    Args:
        config: which GPUs are excluded, and where the node's files are.
        inventory: what the node has; None if it was not looked at.

    Returns:
        Whose each node is, by its major and minor number.
    """
    return dict(_numbers(config, inventory)) if config.excluded_gpus else {}


def _numbers(config: Config, inventory: Inventory | None) -> Iterator[tuple[tuple[int, int], str]]:
    """The numbers of all nodes of excluded GPUs, each with whose it is."""
    if inventory is not None:
        gpus = inventory.gpus
    else:
        found = find_gpus(Witness("/"), config, None).gpus
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
    # Of a GPU of another vendor, sysfs knows the address alone.
    addresses = {gpu.bus_id: str(gpu) for gpu in excluded}
    addresses |= {name: f"the GPU at {name}" for name in config.excluded_gpus if ":" in name}
    nodes = [
        (name, owner)
        for address, owner in addresses.items()
        for name in _names(f"{config.sys}/bus/pci/devices/{address}/drm")
    ]
    for name, owner in (*nodes, *_of_partitions(config, addresses)):
        try:
            number = os.stat(f"{config.dev}/dri/{name}").st_rdev
        except OSError:
            continue
        yield (os.major(number), os.minor(number)), owner


def _of_partitions(config: Config, owners: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The DRM nodes of AMD's GPUs, whose partitions but the first are no PCI devices."""
    from hooks.vendors import amd  # noqa: PLC0415 - few nodes exclude anything

    for gpu in amd.find(config)[0]:
        if gpu.address in owners:
            for name in gpu.device.minors:
                yield name, owners[gpu.address]


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
