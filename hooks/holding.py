"""Which devices a container holds, by the record of its injection, or by its device nodes.

Rules
- A device goes by its UUID; a GPU that has none, by its PCI address.
- A MIG device is held by who has all its capability nodes. The node of a GPU that goes with one of
  its MIG devices is not the whole GPU.
- A record may be damaged, or of a node that was divided otherwise: what is in it is checked.

Source: :mod:`hooks.record`; the MIG user guide, "Device Nodes and Capabilities".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hooks.node.gpus import Gpu
    from hooks.node.inventory import Inventory

__all__ = ["gpus_of", "held_by_nodes", "held_by_record", "id_of"]


def id_of(gpu: Gpu) -> str:
    """What a GPU goes by: its UUID, or its PCI address if it has none."""
    return gpu.uuid or gpu.bus_id


def gpus_of(devices: Iterable[str], inventory: Inventory | None) -> tuple[str, ...]:
    """The GPUs that devices are, or are parts of; those that the node does not have are left out.

    Args:
        devices: what GPUs and MIG devices go by.
        inventory: what the node has; None if that is not known.
    """
    if inventory is None:
        return ()
    gpus = {gpu.index: id_of(gpu) for gpu in inventory.gpus}
    known = {gpu: gpu for gpu in gpus.values()}
    known |= {device.uuid: gpus.get(device.gpu, "") for device in inventory.mig_devices}
    found = (known.get(device, "") for device in devices)
    return tuple(dict.fromkeys(gpu for gpu in found if gpu))


def held_by_nodes(paths: Iterable[str], inventory: Inventory) -> dict[str, str]:
    """What a container has by its device nodes, each device with its GPU.

    Args:
        paths: of the nodes, in the container.
        inventory: what the node has.

    Returns:
        Of each device its GPU, which of a whole GPU is that itself; whole GPUs come first.
    """
    there = frozenset(paths)
    gpus = {gpu.index: id_of(gpu) for gpu in inventory.gpus}
    parts = {
        device.uuid: gpus.get(device.gpu, "")
        for device in inventory.mig_devices
        if device.paths and there.issuperset(device.paths)
    }
    divided = frozenset(parts.values())
    whole = [gpus[gpu.index] for gpu in inventory.gpus if gpu.path in there]
    return {gpu: gpu for gpu in whole if gpu not in divided} | parts


def held_by_record(record: Mapping[str, Any], inventory: Inventory | None) -> dict[str, str]:
    """What a container was given by its record, each device with its GPU.

    Args:
        record: of its injection (:mod:`hooks.record`).
        inventory: what the node has; None if that is not known.

    Returns:
        As :func:`held_by_nodes`; the GPU of a MIG device is "" if it is not known.
    """
    grant = record.get("grant")
    if not isinstance(grant, dict):
        return {}
    whole = [_named(entry) for entry in _objects(grant.get("gpus"))]
    parts = {_named(e): _parent(e, inventory) for e in _objects(grant.get("mig_devices"))}
    held = {gpu: gpu for gpu in whole} | parts
    return {device: gpu for device, gpu in held.items() if device}


def _named(entry: Mapping[str, Any]) -> str:
    name = entry.get("uuid") or entry.get("bus_id")
    return name if isinstance(name, str) else ""


def _parent(entry: Mapping[str, Any], inventory: Inventory | None) -> str:
    if inventory is None:
        return ""
    known = (device.gpu for device in inventory.mig_devices if device.uuid == entry.get("uuid"))
    index = next(known, entry.get("gpu"))
    return next((id_of(gpu) for gpu in inventory.gpus if gpu.index == index), "")


def _objects(listed: object) -> list[dict[str, Any]]:
    return [e for e in listed if isinstance(e, dict)] if isinstance(listed, list) else []
