"""How many containers may have a device at the same time: ``[sharing]`` of the configuration.

Rules
- A device is a whole GPU or a MIG device. ``holders`` is the limit for all, ``holders-of`` for one.
  A MIG device without its own limit has that of its GPU.
- A container with a whole GPU also has each of its MIG devices, and vice versa: MIG mode may have
  been turned on in the meantime.
- A container holds a device from before its creation until its task is deleted, or until its init
  and all its other processes have ended. Devices that it got while there was no limit count as
  well.
- Containers in exempt namespaces do not count and are not refused. The configuration can exempt
  containers with only ``utility`` too. By default they count, because an image can bring its own
  libraries.
- Limits also apply to devices that a spec already lists (``--device``, or CDI that containerd
  applies for a kubelet): such a container holds the devices whose nodes are listed. A privileged
  container lists all nodes, which proves nothing, so it does not count and is not refused. Devices
  from another vendor's CDI file are counted by their nodes afterwards, and are not refused.
- A container beyond the limit fails with an error that names the holder, or starts without any GPU,
  as configured. If it starts, it keeps what its spec already lists, and counts. A limit is not a
  permission, so [policy] does not cover it.
- A device is identified by its UUID, or by its PCI address if it is a GPU without a UUID.
- A container holds a MIG device if it has all of its capability nodes. The node of a GPU, next to
  those of one of its MIG devices, does not mean the whole GPU.
- A record may be damaged, or from before the node was repartitioned, so its content is checked.

The shims maintain the list of claims: :mod:`shim.work.claims`.

Source: the MIG user guide, "Device Nodes and Capabilities".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from api.values import dataclass, replace
from hooks.config import Config, Holders
from hooks.edits.grant import Grant
from hooks.errors import DeviceHeld, enumerated
from hooks.node.cache import StoredInventory
from hooks.node.gpus import Gpu, MigDevice
from hooks.node.inventory import Inventory
from hooks.requests.policy import Verdict
from hooks.words import Capability

__all__ = ["by_name", "gpus_of", "held_by_nodes", "held_by_record", "id_of"]


def id_of(gpu: Gpu) -> str:
    """Return the id of a GPU: its UUID, or its PCI address if it has none."""
    return gpu.uuid or gpu.bus_id


def by_name(mig_devices: Iterable[MigDevice], gpus: Iterable[Gpu]) -> dict[str, Gpu | MigDevice]:
    """Return MIG devices and GPUs, in this order, by id."""
    found: dict[str, Gpu | MigDevice] = {each.uuid: each for each in mig_devices}
    return found | {id_of(gpu): gpu for gpu in gpus}


def gpus_of(devices: Iterable[str], inventory: Inventory | None) -> tuple[str, ...]:
    """Return the GPU of each device, without devices that the node does not have.

    Args:
        devices: ids of GPUs and MIG devices.
        inventory: what the node has; None if unknown.
    """
    if inventory is None:
        return ()
    gpus = {gpu.index: id_of(gpu) for gpu in inventory.gpus}
    known = {gpu: gpu for gpu in gpus.values()}
    known |= {device.uuid: gpus.get(device.gpu, "") for device in inventory.mig_devices}
    found = (known.get(device, "") for device in devices)
    return tuple(dict.fromkeys(gpu for gpu in found if gpu))


def held_by_nodes(paths: Iterable[str], inventory: Inventory | StoredInventory) -> dict[str, str]:
    """Return the devices that a container's nodes show it has, each with its GPU.

    Returns:
        The GPU of each device; that of a whole GPU is itself. Whole GPUs come first.
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


def held_by_record(
    record: Mapping[str, Any], inventory: Inventory | StoredInventory | None
) -> dict[str, str]:
    """Return the devices that a container got according to its record, each with its GPU.

    Args:
        inventory: what the node has; None if unknown.

    Returns:
        As for :func:`held_by_nodes`; the GPU of a MIG device is "" if unknown.
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


def _parent(entry: Mapping[str, Any], inventory: Inventory | StoredInventory | None) -> str:
    if inventory is None:
        return ""
    known = (device.gpu for device in inventory.mig_devices if device.uuid == entry.get("uuid"))
    index = next(known, entry.get("gpu"))
    return next((id_of(gpu) for gpu in inventory.gpus if gpu.index == index), "")


def _objects(listed: object) -> list[dict[str, Any]]:
    return [e for e in listed if isinstance(e, dict)] if isinstance(listed, list) else []


# A message is one line, and a device may have many holders.
_MOST_NAMED: Final = 4


@dataclass(frozen=True, slots=True)
class Wanted:
    """A device that a container should get."""

    uuid: str  # its own; the PCI address of a GPU that has none
    gpu: str  # its GPU's; for a whole GPU, the same
    limit: int  # how many may have it at once; 0 for any number
    name: str


@dataclass(frozen=True, slots=True)
class Claim:
    """The devices that a container holds."""

    title: str
    bundle: str
    devices: tuple[str, ...]  # UUIDs of whole GPUs and of MIG devices
    parents: tuple[str, ...] = ()  # UUIDs of the GPUs of those MIG devices

    def has(self, wanted: Wanted) -> bool:
        """Whether it holds a device, or the whole or a part of it."""
        if wanted.uuid in self.devices or wanted.gpu in self.devices:
            return True
        return wanted.uuid == wanted.gpu and wanted.uuid in self.parents


def is_limited(config: Config) -> bool:
    """Whether any device of this node has a limit."""
    return config.holders != Holders.ANY or bool(config.holders_of)


def is_exempt(config: Config, namespace: str, capabilities: Iterable[str]) -> bool:
    """Whether a container is exempt from limits.

    Args:
        namespace: the namespace of its pod; "" for none.
    """
    if namespace and namespace in config.holders_exempt:
        return True
    return config.holders_exempt_utility and set(capabilities) == {Capability.UTILITY}


def limit_of(config: Config, gpu: Gpu, device: MigDevice | None = None) -> int:
    """Return how many containers may have a device at the same time; 0 for any number.

    Args:
        device: one of its MIG devices; None for the whole GPU.
    """
    limits = dict(each.rsplit("=", 1) for each in config.holders_of)
    names = [gpu.uuid, gpu.bus_id, str(gpu.index)]
    if device is not None:
        names = [device.uuid, f"{device.gpu}:{device.index}", *names]
    limit = next((limits[name] for name in names if name in limits), config.holders)
    words: dict[int | str, int] = {Holders.ANY: 0, Holders.EXCLUSIVE: 1}
    return words[limit] if limit in words else int(limit)


def wanted_of(grant: Grant, inventory: Inventory, config: Config) -> tuple[Wanted, ...]:
    """Return the devices of a grant, each with its limit."""
    return _wanted(grant.gpus, grant.mig_devices, inventory, config)


def wanted_by_nodes(
    paths: Iterable[str], inventory: Inventory, config: Config
) -> tuple[Wanted, ...]:
    """Return the devices whose nodes are in a container's spec, each with its limit."""
    held = held_by_nodes(paths, inventory)
    whole = [gpu for gpu in inventory.gpus if id_of(gpu) in held]
    parts = [device for device in inventory.mig_devices if device.uuid in held]
    return _wanted(whole, parts, inventory, config)


def _wanted(
    whole: Iterable[Gpu], parts: Iterable[MigDevice], inventory: Inventory, config: Config
) -> tuple[Wanted, ...]:
    gpus = {gpu.index: gpu for gpu in inventory.gpus}
    devices = [(gpu, None) for gpu in whole] + [(gpus[d.gpu], d) for d in parts if d.gpu in gpus]
    return tuple(
        Wanted(
            id_of(gpu) if device is None else device.uuid,
            id_of(gpu),
            limit_of(config, gpu, device),
            str(device or gpu),
        )
        for gpu, device in devices
    )


def held_too_often(
    wanted: Iterable[Wanted], claims: Sequence[Claim]
) -> list[tuple[Wanted, list[Claim]]]:
    """Return the devices that have reached their limit, each with its holders.

    Args:
        claims: the claims of the other containers.
    """
    found = []
    for device in wanted:
        holders = [claim for claim in claims if device.limit and claim.has(device)]
        if device.limit and len(holders) >= device.limit:
            found.append((device, holders))
    return found


def refusal(title: str, crowded: Sequence[tuple[Wanted, list[Claim]]]) -> DeviceHeld:
    """Return the error for a container whose devices have reached their limit.

    Args:
        crowded: the result of :func:`held_too_often`; not empty.
    """
    device, holders = crowded[0]
    more = f", and {len(crowded) - 1} more" if len(crowded) > 1 else ""
    limit = "one container" if device.limit == 1 else f"{device.limit} containers"
    titles = enumerated((claim.title for claim in holders), most=_MOST_NAMED)
    return DeviceHeld(
        f"{device.name}{more} for {title}",
        found=f"{limit} may have it, and {titles} {'has' if len(holders) == 1 else 'have'} it",
        do="end that one first, or let more have it: [sharing] holders",
    )


def without_gpus(verdict: Verdict, why: str) -> Verdict:
    """Return the verdict of a container that starts without GPUs because others hold them."""
    allowed = verdict.allowed.without_nvidia()
    return replace(verdict, allowed=allowed, denials=(*verdict.denials, why))


def claim_of(held: Mapping[str, str], bundle: str, title: str) -> Claim | None:
    """Return the claim of a container; None if it has no device.

    Args:
        held: its devices, each with its GPU (:mod:`hooks.sharing`).
    """
    parents = (gpu for device, gpu in held.items() if gpu and gpu != device)
    return Claim(title, bundle, tuple(held), tuple(dict.fromkeys(parents))) if held else None


def is_exempt_by_record(config: Config, record: Mapping[str, Any]) -> bool:
    """Whether a container that was created before there was a limit is exempt.

    Args:
        record: the record of its injection (:mod:`hooks.record`).
    """
    grant, policy = record.get("grant"), record.get("policy")
    namespace = policy.get("namespace") if isinstance(policy, dict) else ""
    listed = grant.get("capabilities") if isinstance(grant, dict) else None
    capabilities = [e for e in listed if isinstance(e, str)] if isinstance(listed, list) else []
    return is_exempt(config, namespace if isinstance(namespace, str) else "", capabilities)
