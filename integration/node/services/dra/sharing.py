"""Share devices between claims, by configuration or by shares of a device. Pure.

Rules of configured sharing
- The devices of one MPS configuration are clients of one daemon, as in NVIDIA's driver. Its name is
  ``claims/UID-HASH``: the claim's UID, and a hash of the devices.
- A configuration may refer to a device of a claim by its position, counted from 0 in the order of
  GPU indices.
- A MIG device has no time slice of its own, and CUDA sees at most one MIG device. So a daemon
  serves either one MIG device, or whole GPUs.
- Admin access (``adminAccess``) does not change how a device is shared.
- Clients find their daemon through the claim's CDI spec. If a container has devices of two daemons,
  it is a client of the last one only.

Rules of shares (consumable capacity)
- ``--dra-shares`` sets how many shares a device has. They are at most as many as ``[sharing]``
  of the configuration allows containers on it, because the shim would refuse the others. A device
  that only one container may have gets no shares.
- ``memory`` and ``unlimited`` in place of the number are modes of NVIDIA's driver. A device then
  has a number of shares only if ``[sharing]`` has a limit. A claim that requests no memory gets all
  of it (``memory``), or none of it (``unlimited``).
- A device that consumes counters gets no shares. This concerns MIG devices that the driver creates:
  schedulers before Kubernetes 1.37 do not give such a device to a second claim (134100, 140433,
  140436), or lose count of it and give its GPU to other claims, too (139034, until 1.36.2).
- With a number, a claim that requests no memory gets one share, and the memory of that share. It
  gets none of a MIG device's other capacities, or nothing would be left for the next claim.
- An allocation without a share id is the whole GPU. API servers with the feature gate
  DRAConsumableCapacity off drop what the driver publishes about shares.
- The scheduler counts memory and shares, and the driver counts them again.
- All claims on a device have to share it in the same way: with MPS or without, and with one time
  slice. A claim that names no time slice is compatible with any.
- All shares of a device have one daemon (``shares/UUID``), whichever claims they belong to: a
  device has one MPS server at most. The daemon has no limits; each share's limits are variables of
  its containers. One configuration sets up MPS for the shares of one device only.

Source: kubernetes-sigs/dra-driver-nvidia-gpu, sharing.go; CDI specification; Kubernetes,
resource.k8s.io/v1, CapacityRequestPolicy; KEP-5075, KEP-4815.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from hooks.cdi.spec import Edits, SpecMount
from hooks.config import Config
from hooks.node.inventory import Inventory
from hooks.sharing import limit_of
from integration.agent_errors import (
    ClaimConfigUnknown,
    DeviceTaken,
    NodeAgentError,
    SharingConflict,
)
from integration.containers.shares import Share, variable_of
from integration.node.mps.claim_daemons import CLAIMS, SHARES
from integration.node.mps.paths import SHM, Places, shm
from integration.node.mps.plan import ClaimDaemon
from integration.node.options import DRA_DRIVER, MEMORY, UNLIMITED
from integration.node.services.dra.devices import MOST_FACTS, NVIDIA, SLICE, Device
from integration.node.values.claims import (
    ALL,
    GPU,
    MEBI,
    MIG,
    Claim,
    ClaimDevice,
    Sharing,
    parse_quantity,
    quantity,
)

__all__ = [
    "MPS", "OURS", "AllocatedDevice", "Configuration", "SharingRequest", "configured", "consumed",
    "daemons_of", "edits_of", "policy_of", "refuse_conflicts", "refuse_overfull", "with_shares",
]  # fmt: skip

_HASH: Final = 5
_OPTIONS: Final = ("nosuid", "nodev", "bind")


MPS: Final = "mps"
"""Stands for the name of a daemon while that is unknown."""

OURS: Final = f"{DRA_DRIVER}/v1beta1"
"""The apiVersion of the driver's own configurations."""


class SharingRequest(NamedTuple):
    """How a configuration asks to share devices; which devices is not known yet."""

    sharing: Sharing = Sharing()  # with MPS the daemon is :data:`MPS`
    # MiB that an MPS client may use of a device, by the device's UUID or place in the claim
    memory_of: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Configuration:
    """A configuration for this driver."""

    kind: str  # "GpuConfig"
    devices: frozenset[str]  # the kinds of devices that it applies to
    requests: frozenset[str]  # those that it applies to; empty for all
    sharing: SharingRequest


class AllocatedDevice(NamedTuple):
    """A device that was allocated to a claim."""

    request: str  # the claim's, with its subrequest ("gpu/any")
    device: ClaimDevice  # as the claim has it
    known: Device  # as the node has it


def configured(
    uid: str,
    results: Sequence[AllocatedDevice],
    configurations: Sequence[Configuration],
    asked: str,
) -> tuple[ClaimDevice, ...]:
    """Return the devices of a claim, with their sharing.

    Raises:
        ClaimConfigUnknown: a configuration is impossible for these devices.
    """
    groups: dict[int, list[AllocatedDevice]] = {}
    for result in results:
        kind = GPU if result.known.uuid == result.known.gpu else MIG
        place = _chosen(configurations, result.request, kind, asked)
        if place is not None and not result.device.admin:
            groups.setdefault(place, []).append(result)
    shared: dict[int, Sharing] = {}
    for place, group in groups.items():
        found = _of_group(uid, group, configurations[place], asked)
        shared |= {id(result.device): sharing for result, sharing in found}
    return tuple(
        replace(each.device, sharing=shared.get(id(each.device), Sharing())) for each in results
    )


def _chosen(
    configurations: Sequence[Configuration], request: str, kind: str, asked: str
) -> int | None:
    """Return the index of the configuration that applies to a device; None if none does.

    Args:
        request: the request of the device, with its subrequest ("gpu/any").
    """
    names = {request, request.partition("/")[0]}
    for place in reversed(range(len(configurations))):
        each = configurations[place]
        if each.requests and names.isdisjoint(each.requests):
            continue
        if kind in each.devices:
            return place
        if each.requests:
            raise ClaimConfigUnknown(
                f"a configuration of {asked}",
                found=f"{each.kind} is not for the request {request}, which was given a device of "
                f"the type {kind}",
                do=f"use {OURS} DeviceSharing, or name other requests",
            )
    return None


def _of_group(
    uid: str, group: Sequence[AllocatedDevice], configuration: Configuration, asked: str
) -> list[tuple[AllocatedDevice, Sharing]]:
    sharing, memory_of = configuration.sharing
    parts = [each.device.device for each in group if each.known.uuid != each.known.gpu]
    if sharing.time_slice and parts:
        raise _wrong(
            asked, f"{configuration.kind} asks for a time slice of {parts[0]}, a MIG device",
            "ask for time slices of whole GPUs only",
        )  # fmt: skip
    if not sharing.daemon:
        return [(each, sharing) for each in group]
    several = len({each.device.uuid for each in group}) > 1
    if parts and several:
        raise _wrong(
            asked, f"{configuration.kind} asks for one MPS daemon for {len(group)} devices, but "
            f"{parts[0]} is a MIG device",
            "configure each request in its own entry: a daemon serves at most one MIG device",
        )  # fmt: skip
    shares = [each.device for each in group if each.device.share]
    if shares and several:
        raise _wrong(
            asked, f"{configuration.kind} asks for one MPS daemon for {len(group)} devices, but "
            f"{shares[0].device} is a share of a device",
            "configure each request in its own entry",
        )  # fmt: skip
    ordered = sorted(group, key=lambda each: each.known.attributes.get("index", {}).get("int", 0))
    limits = _limits([each.known.uuid for each in ordered], sharing.memory, memory_of, asked)
    # UUIDs of MIG devices of older drivers have slashes in them.
    of_shares = shares and f"{SHARES}/{shares[0].uuid.replace('/', '-')}"
    daemon = of_shares or _daemon(uid, ordered)
    found = []
    for each in ordered:
        sizes = filter(None, (limits[each.known.uuid], each.device.memory))
        found.append((each, replace(sharing, daemon=daemon, memory=min(sizes, default=0))))
    return found


def _limits(
    uuids: Sequence[str], memory: int, memory_of: Mapping[str, int], asked: str
) -> dict[str, int]:
    """Return the limit of each device in MiB; 0 for no limit."""
    limits = dict.fromkeys(uuids, memory)
    for key, size in memory_of.items():
        uuid = key
        if key.isascii() and key.isdecimal() and int(key) < len(uuids):
            uuid = uuids[int(key)]
        if uuid not in limits:
            raise _wrong(
                asked, f"it limits the memory of {key}, but has {', '.join(uuids)}",
                f"name one of these, or a place from 0 to {len(uuids) - 1}",
            )  # fmt: skip
        limits[uuid] = size
    return limits


def _daemon(uid: str, group: Iterable[AllocatedDevice]) -> str:
    # By name: a MIG device that does not exist yet has no UUID.
    content = ",".join(sorted(each.device.device for each in group)).encode()
    return f"{CLAIMS}/{uid}-{hashlib.sha256(content).hexdigest()[:_HASH]}"


def _wrong(asked: str, found: str, do: str) -> NodeAgentError:
    return ClaimConfigUnknown(f"a configuration of {asked}", found=found, do=do)


def daemons_of(claims: Iterable[Claim]) -> Mapping[str, ClaimDaemon]:
    """Return the MPS control daemons that claims need, by their names."""
    found: dict[str, ClaimDaemon] = {}
    for claim in claims:
        for device in claim.devices:
            how, is_share = device.sharing, bool(device.share)
            if how.daemon:
                threads = ALL if is_share else how.threads
                known = found.get(how.daemon, ClaimDaemon({}, threads, how.multi_user))
                limits = {**known.limits, device.uuid: 0 if is_share else how.memory}
                found[how.daemon] = replace(known, limits=limits)
    return found


def edits_of(device: ClaimDevice, root: str) -> Edits:
    """Return the CDI edits that sharing adds to those of the device."""
    how, env = device.sharing, []
    if device.share:
        env = [variable_of(Share(device.share, device.uuid, device.memory, device.shares))]
    if not how.daemon:
        return Edits(env=tuple(env))
    places = Places(root, how.daemon)
    env.append(f"CUDA_MPS_PIPE_DIRECTORY={places.container_pipe}")
    if device.share and how.memory:
        env.append(f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={how.memory}M")
    if device.share and how.threads < ALL:
        env.append(f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={how.threads}")
    return Edits(
        env=tuple(env),
        mounts=(
            SpecMount(places.pipe, places.container_pipe, ("ro", *_OPTIONS)),
            SpecMount(shm(root), SHM, ("rw", *_OPTIONS)),
        ),
    )


MOST: Final = 64
_MEMORY: Final = f"{NVIDIA}/memory"
_SHARES: Final = f"{NVIDIA}/shares"


def with_shares(
    devices: Iterable[Device], mode: int | str, inventory: Inventory, config: Config
) -> tuple[Device, ...]:
    """Return the node's devices, with shares where they can have some.

    Args:
        mode: the number of shares of a device, 0 for none; or MEMORY or UNLIMITED.
    """
    gpus = {gpu.uuid: gpu for gpu in inventory.gpus}
    parts = {each.uuid: each for each in inventory.mig_devices}
    found = []
    for device in devices:
        shares = 1
        if device.counters is None and device.gpu in gpus:
            limit = limit_of(config, gpus[device.gpu], parts.get(device.uuid))
            shares = limit if isinstance(mode, str) else min(mode, limit or mode)
        is_shared = shares > 1 or (isinstance(mode, str) and not shares)
        found.append(_shared(device, shares, mode) if is_shared else device)
    return tuple(found)


def _shared(device: Device, shares: int, mode: int | str) -> Device:
    total = device.capacity.get(_MEMORY, "0")
    part = (parse_quantity(total) or 0) // max(shares, 1) // MEBI * MEBI
    memory = {MEMORY: total, UNLIMITED: "0"}.get(str(mode), quantity(part))
    capacity = {**device.capacity, **({_SHARES: str(shares)} if shares else {})}
    if len(device.attributes) + len(capacity) >= MOST_FACTS:  # its health is one more
        capacity = {name: has for name, has in capacity.items() if not name.startswith(SLICE)}
    return replace(device, capacity=capacity, shares=shares, share_memory=memory)


def policy_of(device: Device, name: str) -> dict[str, Any]:
    """Return the request policy of a capacity, as in the API; empty without shares."""
    if not device.share_memory:
        return {}
    if name == _SHARES:
        valid = {"min": "1", "max": str(device.shares), "step": "1"}
        return {"requestPolicy": {"default": "1", "validRange": valid}}
    if name != _MEMORY:
        return {"requestPolicy": {"default": "0", "validRange": {"min": "0"}}}
    default = device.share_memory
    least = quantity(MEBI) if parse_quantity(default) else "0"
    valid = {"min": least, "max": device.capacity[name], "step": quantity(MEBI)}
    return {"requestPolicy": {"default": default, "validRange": valid}}


def consumed(result: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return which share of a device an allocation stands for.

    Returns:
        The share's id, "" for the whole device; its memory in MiB and number of shares, 0 if
        unknown.
    """
    share = str(result.get("shareID") or "")
    capacity = result.get("consumedCapacity")
    if not share or not isinstance(capacity, dict):
        return share, 0, 0
    memory = parse_quantity(capacity.get(_MEMORY)) or 0
    return share, memory // MEBI, parse_quantity(capacity.get(_SHARES)) or 0


def refuse_overfull(claim: Claim, others: Iterable[Claim], devices: Mapping[str, Device]) -> None:
    """Check that the shares of a device fit into it.

    Args:
        devices: the node's devices, by name.

    Raises:
        DeviceTaken: they do not fit.
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
            # Sorted, so that a repeated refusal has the same text and is one event of the pod.
            takers = {who for each, who in parts if each.memory or each.shares}
            names = ", ".join(sorted(takers - {str(claim)}))
            raise DeviceTaken(
                f"{device.shares} shares and {device.memory}Mi of {device.device} for {claim}",
                found=f"with {names or 'its other shares'} it would have {shares} shares and "
                f"{memory}Mi; it can have {known.shares or 'any number'} and {total}Mi",
            )


def refuse_conflicts(claim: Claim, others: Iterable[Claim]) -> None:
    """Check that claims on the same device share it in the same way.

    Raises:
        SharingConflict: another claim shares it in another way.
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
    """Return whether another device of a claim is a share of the same device."""
    return bool(other.share) and not other.admin and other.uuid == device.uuid


def _conflict(device: ClaimDevice, other: ClaimDevice) -> str:
    """Return how another claim shares a device differently; "" if it does not."""
    mine, its = device.sharing, other.sharing
    if bool(mine.daemon) != bool(its.daemon):
        return "by MPS" if its.daemon else "without MPS"
    if its.daemon and mine.multi_user != its.multi_user:
        return f"with multiUser {'true' if its.multi_user else 'false'}"
    if mine.time_slice and its.time_slice and mine.time_slice != its.time_slice:
        return f"with the time slice {its.time_slice}"
    return ""
