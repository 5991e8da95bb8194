"""How the devices of a claim are shared, by what is configured for them. Pure.

Rules
- The devices that one configuration has MPS for are clients of one daemon, as NVIDIA's driver has
  it: ``claims/UID-HASH``, of the claim's UID and of which devices these are.
- A place among the devices of a claim is by the index of their GPUs, from 0.
- Shares of a device have one daemon, whichever claims they are of (``shares/UUID``): a device has
  one server at most. It has no limits; those of a share are variables of its containers. One
  configuration has MPS for shares of one device.
- A MIG device has no time slice of its own, and CUDA sees one MIG device at most: a daemon has one,
  or whole GPUs.
- Who only looks after a device (``adminAccess``) changes nothing of it.
- Clients find their daemon by the claim's CDI spec. A container that has devices of two daemons is
  a client of the last one alone.

Source: kubernetes-sigs/dra-driver-nvidia-gpu, sharing.go; CDI specification.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from hooks.cdi.spec import Edits, SpecMount
from integration.inspection.shares import Share, variable_of
from integration.node.dra.configuration import ALL, GPU, MIG, chosen
from integration.node.dra.values import Sharing
from integration.node.errors import ClaimConfigUnknown
from integration.node.mps.claims import CLAIMS, SHARES
from integration.node.mps.places import SHM, Places, shm
from integration.node.mps.plan import ClaimDaemon

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from integration.node.dra.configuration import Configuration, Mps
    from integration.node.dra.devices import Device
    from integration.node.dra.values import Claim, ClaimDevice

__all__ = ["Result", "configured", "daemons_of", "edits_of"]

_HASH: Final = 5
_OPTIONS: Final = ("nosuid", "nodev", "bind")


class Result(NamedTuple):
    """A device that was allocated to a claim."""

    request: str  # the claim's, with its subrequest ("gpu/any")
    device: ClaimDevice  # as the claim has it
    known: Device  # as the node has it


def configured(
    uid: str, results: Sequence[Result], configurations: Sequence[Configuration], asked: str
) -> tuple[ClaimDevice, ...]:
    """The devices of a claim, each with how it is shared.

    Args:
        uid: of the claim.
        asked: the claim, for messages.

    Raises:
        ClaimConfigUnknown: what is asked for cannot be had of these devices.
    """
    groups: dict[int, list[Result]] = {}
    for result in results:
        kind = GPU if result.known.uuid == result.known.gpu else MIG
        place = chosen(configurations, result.request, kind, asked)
        if place is not None and not result.device.admin:
            groups.setdefault(place, []).append(result)
    shared: dict[int, Sharing] = {}
    for place, group in groups.items():
        found = _of_group(uid, group, configurations[place], asked)
        shared |= {id(result.device): sharing for result, sharing in found}
    return tuple(
        replace(each.device, sharing=shared.get(id(each.device), Sharing())) for each in results
    )


def _of_group(
    uid: str, group: Sequence[Result], configuration: Configuration, asked: str
) -> list[tuple[Result, Sharing]]:
    wish = configuration.wish
    parts = [each.device.device for each in group if each.known.uuid != each.known.gpu]
    if wish.time_slice and parts:
        raise _wrong(
            asked, f"{configuration.kind} asks for a time slice of {parts[0]}, a MIG device",
            "ask for it of whole GPUs only",
        )  # fmt: skip
    if wish.mps is None:
        return [(each, Sharing(wish.time_slice)) for each in group]
    several = len({each.device.uuid for each in group}) > 1
    if parts and several:
        raise _wrong(
            asked, f"{configuration.kind} asks for one MPS daemon for {len(group)} devices, of "
            f"which {parts[0]} is a MIG device",
            "configure each request by an entry of its own: a daemon has one MIG device at most",
        )  # fmt: skip
    shares = [each.device for each in group if each.device.share]
    if shares and several:
        raise _wrong(
            asked, f"{configuration.kind} asks for one MPS daemon for {len(group)} devices, of "
            f"which {shares[0].device} is a share of a device",
            "configure each request by an entry of its own",
        )  # fmt: skip
    ordered = sorted(group, key=lambda each: each.known.attributes.get("index", {}).get("int", 0))
    limits = _limits([each.known.uuid for each in ordered], wish.mps, asked)
    # UUIDs of MIG devices of older drivers have slashes in them.
    of_shares = shares and f"{SHARES}/{shares[0].uuid.replace('/', '-')}"
    daemon = of_shares or _daemon(uid, ordered)
    return [
        (
            each,
            Sharing(
                daemon=daemon,
                threads=wish.mps.threads,
                memory=min(
                    (size for size in (limits[each.known.uuid], each.device.memory) if size),
                    default=0,
                ),
                multi_user=wish.mps.multi_user,
            ),
        )
        for each in ordered
    ]


def _limits(uuids: Sequence[str], mps: Mps, asked: str) -> dict[str, int]:
    """MiB of each device; 0 for no limit."""
    limits = dict.fromkeys(uuids, mps.memory)
    for key, size in mps.memory_of.items():
        uuid = key
        if key.isascii() and key.isdecimal() and int(key) < len(uuids):
            uuid = uuids[int(key)]
        if uuid not in limits:
            raise _wrong(
                asked, f"it limits the memory of {key}, and has {', '.join(uuids)}",
                f"name one of these, or a place from 0 to {len(uuids) - 1}",
            )  # fmt: skip
        limits[uuid] = size
    return limits


def _daemon(uid: str, group: Iterable[Result]) -> str:
    # By name: a MIG device that has yet to be made has no UUID.
    content = ",".join(sorted(each.device.device for each in group)).encode()
    return f"{CLAIMS}/{uid}-{hashlib.sha256(content).hexdigest()[:_HASH]}"


def _wrong(asked: str, found: str, do: str) -> ClaimConfigUnknown:
    return ClaimConfigUnknown(f"a configuration of {asked}", found=found, do=do)


def daemons_of(claims: Iterable[Claim]) -> Mapping[str, ClaimDaemon]:
    """The MPS control daemons that claims need, by what they are called."""
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
    """What containers get beside the device itself.

    Args:
        root: the host's directory of MPS.
    """
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
