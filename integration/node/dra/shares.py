"""GPUs and MIG devices of which several claims may have a part (consumable capacity). Pure.

Rules
- It is only so where the agent is told (``--dra-shares``). A device then has so many shares, or
  fewer: no more than ``[sharing]`` of the configuration lets containers have it, for the shim would
  refuse those that come after. One that one container may have is not shared.
- What takes from counters is not shared, as MIG devices do that are made for claims: schedulers of
  Kubernetes 1.34 to 1.36 give such a device to no second claim (kubernetes 134100, 140433), or
  forget what its claims take of its GPU and give that to others, too (139034).
- A claim that does not say how much it wants gets one share, and as much of the memory. Of all else
  that a MIG device has it gets nothing for itself, or none would be left for the next claim.
- An allocation without a share's id is the whole GPU: so it is where the API server does not know
  of shares (its gate DRAConsumableCapacity is off), and drops what we say of them.
- The scheduler counts, and we count memory and shares again: what claims have of a device is never
  more than it has.
- Who shares a device shares it in the same way: by MPS or not, and with one time slice. A claim
  that says nothing of time slices agrees with any.

Source: Kubernetes, resource.k8s.io/v1, CapacityRequestPolicy; KEP-5075, KEP-4815.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from hooks.sharing import limit_of
from integration.node.dra.devices import MOST_FACTS, NVIDIA, SLICE
from integration.node.dra.errors import SharingConflict
from integration.node.dra.quantities import MEBI, parse_quantity, quantity
from integration.node.errors import DeviceTaken

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hooks.config import Config
    from hooks.node.inventory import Inventory
    from integration.node.dra.devices import Device
    from integration.node.dra.values import Claim, ClaimDevice

__all__ = ["MOST", "consumed", "policy_of", "refuse_conflicts", "refuse_overfull", "with_shares"]

MOST: Final = 64
_MEMORY: Final = f"{NVIDIA}/memory"
_SHARES: Final = f"{NVIDIA}/shares"


def with_shares(
    devices: Iterable[Device], most: int, inventory: Inventory, config: Config
) -> tuple[Device, ...]:
    """The node's devices, of which those that can have shares have them.

    Args:
        most: shares of a device; 0 for none.
    """
    gpus = {gpu.uuid: gpu for gpu in inventory.gpus}
    parts = {each.uuid: each for each in inventory.mig_devices}
    found = []
    for device in devices:
        shares = 0
        if most > 1 and device.counters is None and device.gpu in gpus:
            limit = limit_of(config, gpus[device.gpu], parts.get(device.uuid))
            shares = min(most, limit) if limit else most
        found.append(_shared(device, shares) if shares > 1 else device)
    return tuple(found)


def _shared(device: Device, shares: int) -> Device:
    capacity = {**device.capacity, _SHARES: str(shares)}
    if len(device.attributes) + len(capacity) >= MOST_FACTS:  # its health comes on top
        capacity = {name: has for name, has in capacity.items() if not name.startswith(SLICE)}
    return replace(device, capacity=capacity, shares=shares)


def policy_of(device: Device, name: str) -> dict[str, Any]:
    """How much of a capacity a claim may ask for, as the API has it; nothing if it has no shares.

    Args:
        name: of the capacity.
    """
    if not device.shares:
        return {}
    if name == _SHARES:
        valid = {"min": "1", "max": str(device.shares), "step": "1"}
        return {"requestPolicy": {"default": "1", "validRange": valid}}
    if name != _MEMORY:
        return {"requestPolicy": {"default": "0", "validRange": {"min": "0"}}}
    total = parse_quantity(device.capacity[name]) or 0
    default = quantity(total // device.shares // MEBI * MEBI)
    valid = {"min": quantity(MEBI), "max": device.capacity[name], "step": quantity(MEBI)}
    return {"requestPolicy": {"default": default, "validRange": valid}}


def consumed(result: Mapping[str, Any]) -> tuple[str, int, int]:
    """What part of a device an allocation is.

    Returns:
        The share's id, "" for the whole device; its MiB and shares, 0 for what is not said.
    """
    share = str(result.get("shareID") or "")
    capacity = result.get("consumedCapacity")
    if not share or not isinstance(capacity, dict):
        return share, 0, 0
    memory = parse_quantity(capacity.get(_MEMORY)) or 0
    return share, memory // MEBI, parse_quantity(capacity.get(_SHARES)) or 0


def refuse_overfull(claim: Claim, others: Iterable[Claim], devices: Mapping[str, Device]) -> None:
    """See that claims have no more of a device than it has.

    Args:
        others: what is prepared for other claims.
        devices: of the node, by their names.

    Raises:
        DeviceTaken: it would be more.
    """
    theirs = [
        (each, str(other)) for other in others if other.uid != claim.uid for each in other.devices
    ]
    for device in claim.devices:
        known = devices.get(device.device)
        if not device.share or device.admin or known is None:
            continue
        parts = [(each, str(claim)) for each in claim.devices if _shares(each, device)]
        parts += [(each, who) for each, who in theirs if _shares(each, device)]
        total = (parse_quantity(known.capacity.get(_MEMORY)) or 0) // MEBI
        memory = sum(each.memory for each, _ in parts)
        shares = sum(each.shares for each, _ in parts)
        if (total and memory > total) or (known.shares and shares > known.shares):
            # Sorted: a refusal that is repeated is the same event of the pod.
            names = ", ".join(sorted({who for _, who in parts if who != str(claim)}))
            raise DeviceTaken(
                f"{device.shares} shares and {device.memory}Mi of {device.device} for {claim}",
                found=f"with {names or 'its other shares'} it would be {shares} shares and "
                f"{memory}Mi of {known.shares} and {total}Mi",
            )


def refuse_conflicts(claim: Claim, others: Iterable[Claim]) -> None:
    """See that claims that share a device share it in the same way.

    Raises:
        SharingConflict: another one shares it in another way.
    """
    theirs = [(each, str(other)) for other in others for each in other.devices]
    theirs += [(each, str(claim)) for each in claim.devices]
    for device in claim.devices:
        for other, who in theirs:
            if device.share and _shares(other, device) and (why := _conflict(device, other)):
                raise SharingConflict(
                    f"the device {device.device} for {claim}", found=f"{who} shares it {why}"
                )


def _shares(other: ClaimDevice, device: ClaimDevice) -> bool:
    """Whether another one is a share of the same device."""
    return bool(other.share) and not other.admin and other.uuid == device.uuid


def _conflict(device: ClaimDevice, other: ClaimDevice) -> str:
    """In which other way another claim shares a device; "" if it is the same."""
    mine, its = device.sharing, other.sharing
    if bool(mine.daemon) != bool(its.daemon):
        return "by MPS" if its.daemon else "without MPS"
    if its.daemon and mine.multi_user != its.multi_user:
        return f"with multiUser {'true' if its.multi_user else 'false'}"
    if mine.time_slice and its.time_slice and mine.time_slice != its.time_slice:
        return f"with the time slice {its.time_slice}"
    return ""
