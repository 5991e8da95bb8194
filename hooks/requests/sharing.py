"""How many containers may have a device at once: ``[sharing]`` of the configuration.

Rules
- A device is a GPU as a whole, or a MIG device. ``holders`` is for all of them; ``holders-of`` for
  one. A MIG device of which nothing is said is as its GPU is, and that as all are.
- Who has a whole GPU has each of its MIG devices as well, and the other way round: MIG mode may
  have been turned on meanwhile.
- A container has a device from before it is made until its task is deleted, or its init process has
  ended, and all others with it. What it got while there was no limit counts as well.
- Containers of exempt namespaces, and if so configured those that can but look (``utility``),
  neither count nor are refused. Without that setting they do, since an image brings what it likes.
- What a spec lists already (``--device``, CDI that containerd does by itself, as for a kubelet)
  is limited as what we would give: such a container has a device by its nodes. A privileged one has
  them all and says nothing by that: it neither counts nor is refused. What a CDI file of another
  gives is counted by its nodes afterwards, and is not refused.
- One too many is an error that names who has the device; or it starts without any GPU, as
  configured. What its spec lists already it keeps then, and it counts. That is no matter of who may
  have what, so [policy] says nothing of it.

Who has what at a moment is kept by the shims: :mod:`shim.claims`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from api.values import changed, value
from hooks.config import Holders
from hooks.holding import held_by_nodes, id_of
from hooks.requests.policy_errors import DeviceHeld
from hooks.requests.request import Capability, Request, Void

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hooks.config import Config
    from hooks.edits.grant import Grant
    from hooks.node.gpus import Gpu, MigDevice
    from hooks.node.inventory import Inventory
    from hooks.requests.policy import Verdict

__all__ = [
    "Claim",
    "Wanted",
    "claim_of",
    "held_too_often",
    "is_exempt",
    "is_exempt_by_record",
    "is_limited",
    "limit_of",
    "refusal",
    "wanted_by_nodes",
    "wanted_of",
    "without_gpus",
]

# A message is one line, and a device may have many holders.
_MOST_NAMED: Final = 4


@value
class Wanted:
    """A device that a container is to get.

    Attributes:
        uuid: its own; a PCI address, of a GPU that has none.
        gpu: that of its GPU: the same, for a whole one.
        limit: how many may have it at once; 0 for any number.
        name: for people.
    """

    uuid: str
    gpu: str
    limit: int
    name: str


@value
class Claim:
    """What a container has.

    Attributes:
        title: what people call it.
        bundle: its bundle.
        devices: UUIDs of whole GPUs and of MIG devices.
        parents: UUIDs of the GPUs of which those MIG devices are.
    """

    title: str
    bundle: str
    devices: tuple[str, ...]
    parents: tuple[str, ...] = ()

    def has(self, wanted: Wanted) -> bool:
        """Whether it has a device, the whole of it, or a part."""
        if wanted.uuid in self.devices or wanted.gpu in self.devices:
            return True
        return wanted.uuid == wanted.gpu and wanted.uuid in self.parents


def is_limited(config: Config) -> bool:
    """Whether there is any limit on this node."""
    return config.holders != Holders.ANY or bool(config.holders_of)


def is_exempt(config: Config, namespace: str, capabilities: Iterable[str]) -> bool:
    """Whether limits are not for a container.

    Args:
        config: which are.
        namespace: of its pod; "" for none.
        capabilities: of the driver, that it gets.
    """
    if namespace and namespace in config.holders_exempt:
        return True
    return config.holders_exempt_utility and set(capabilities) == {Capability.UTILITY}


def limit_of(config: Config, gpu: Gpu, device: MigDevice | None = None) -> int:
    """How many may have a device at once.

    Args:
        config: what is said of it.
        gpu: the GPU.
        device: a MIG device of it; None for the whole.

    Returns:
        The number; 0 for any.
    """
    said = dict(each.rsplit("=", 1) for each in config.holders_of)
    names = [gpu.uuid, gpu.bus_id, str(gpu.index)]
    if device is not None:
        names = [device.uuid, f"{device.gpu}:{device.index}", *names]
    limit = next((said[name] for name in names if name in said), config.holders)
    return {Holders.ANY: 0, Holders.EXCLUSIVE: 1}.get(str(limit)) or _number(limit)


def _number(limit: int | str) -> int:
    return 0 if limit == Holders.ANY else int(limit)


def wanted_of(grant: Grant, inventory: Inventory, config: Config) -> tuple[Wanted, ...]:
    """The devices of a grant, each with its limit.

    Args:
        grant: what a container is to get.
        inventory: what the node has.
        config: the limits.
    """
    whole = [
        Wanted(id_of(gpu), id_of(gpu), limit_of(config, gpu), str(gpu))
        for gpu in grant.gpus
    ]  # fmt: skip
    parts = []
    for device in grant.mig_devices:
        gpu = inventory.gpus[device.gpu]
        limit = limit_of(config, gpu, device)
        parts.append(Wanted(device.uuid, id_of(gpu), limit, str(device)))
    return (*whole, *parts)


def wanted_by_nodes(
    paths: Iterable[str], inventory: Inventory, config: Config
) -> tuple[Wanted, ...]:
    """The devices that a container has by the nodes in its spec, each with its limit.

    Args:
        paths: of the nodes.
        inventory: what the node has.
        config: the limits.
    """
    held = held_by_nodes(paths, inventory)
    gpus = {gpu.index: gpu for gpu in inventory.gpus}
    whole = [
        Wanted(id_of(gpu), id_of(gpu), limit_of(config, gpu), str(gpu))
        for gpu in inventory.gpus
        if id_of(gpu) in held
    ]
    parts = [
        Wanted(d.uuid, held[d.uuid], limit_of(config, gpus[d.gpu], d), str(d))
        for d in inventory.mig_devices
        if d.uuid in held and d.gpu in gpus
    ]
    return (*whole, *parts)


def held_too_often(
    wanted: Iterable[Wanted], claims: Sequence[Claim]
) -> list[tuple[Wanted, list[Claim]]]:
    """The devices that have as many holders as they may have, each with who these are.

    Args:
        wanted: what a container is to get.
        claims: who has what; not that container itself.
    """
    found = []
    for device in wanted:
        holders = [claim for claim in claims if device.limit and claim.has(device)]
        if device.limit and len(holders) >= device.limit:
            found.append((device, holders))
    return found


def refusal(title: str, crowded: Sequence[tuple[Wanted, list[Claim]]]) -> DeviceHeld:
    """Why a container may not have what it is to get.

    Args:
        title: what people call it.
        crowded: what :func:`held_too_often` said; not nothing.
    """
    device, holders = crowded[0]
    more = f", and {len(crowded) - 1} more" if len(crowded) > 1 else ""
    limit = "one container" if device.limit == 1 else f"{device.limit} containers"
    return DeviceHeld(
        f"{device.name}{more} for {title}",
        found=f"{limit} may have it, and {_enumerated(holders)} {_has(holders)} it",
        do="end that one first, or let more have it: [sharing] holders",
    )


def _has(holders: Sequence[Claim]) -> str:
    return "has" if len(holders) == 1 else "have"


def _enumerated(holders: Sequence[Claim]) -> str:
    named = ", ".join(claim.title for claim in holders[:_MOST_NAMED])
    return named + (f" and {len(holders) - _MOST_NAMED} more" if len(holders) > _MOST_NAMED else "")


def without_gpus(verdict: Verdict, why: str) -> Verdict:
    """The verdict of a container that is to start without what others have.

    Args:
        verdict: what policy said.
        why: what is to be said of it.
    """
    asked = verdict.allowed
    allowed = Request(
        **{name: getattr(asked, name) for name in Request.__slots__}
        | {
            "devices": Void(),
            "features": frozenset(),
            "imex_channels": (),
            "only_variables": frozenset(),
            "capabilities": frozenset(),
            "requirements": (),
        }
    )
    return changed(verdict, allowed=allowed, denials=(*verdict.denials, why))


def claim_of(held: Mapping[str, str], bundle: str, title: str) -> Claim | None:
    """What a container has; None if that is nothing.

    Args:
        held: devices, each with its GPU (:mod:`hooks.holding`).
        bundle: its bundle.
        title: what people call it.
    """
    parents = (gpu for device, gpu in held.items() if gpu and gpu != device)
    return Claim(title, bundle, tuple(held), tuple(dict.fromkeys(parents))) if held else None


def is_exempt_by_record(config: Config, record: Mapping[str, Any]) -> bool:
    """Whether limits are not for a container that was made while there was none.

    Args:
        config: who does not count.
        record: of its injection (:mod:`hooks.record`).
    """
    grant, policy = record.get("grant"), record.get("policy")
    namespace = policy.get("namespace") if isinstance(policy, dict) else ""
    listed = grant.get("capabilities") if isinstance(grant, dict) else None
    capabilities = [e for e in listed if isinstance(e, str)] if isinstance(listed, list) else []
    return is_exempt(config, namespace if isinstance(namespace, str) else "", capabilities)
