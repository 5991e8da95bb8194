"""Which resources a node has, and which devices of each: of the inventory, settings and health.

Rules
- ``migStrategy: none``: the GPUs that are not in MIG mode. ``single``: MIG devices are told of
  as GPUs; all GPUs have to be in MIG mode or none, each has to have a MIG device, and all devices
  have to be alike. ``mixed``: MIG devices by their profiles, and the GPUs that are not in MIG mode.
- A GPU in MIG mode is never a whole device: nothing computes on its node alone, and the shim
  refuses it. NVIDIA's plugin announces it with ``none``, and its pods start with a GPU that CUDA
  does not find.
- A GPU in MIG mode that has no instances yet is an error where it would be mistaken for another
  kind of node (``single``). With ``mixed`` it has nothing to give, and takes nothing from the
  others.
- An instance that is cut further is a resource of its own ("mig-1c.3g.40gb"); NVIDIA's plugin gives
  up there too.
- A device is called by its UUID, a share of it UUID::N. What has no UUID, or one that another has
  too, or is excluded by the configuration, is not told of at all.
- What is lost, has lost its node, or is out of service stays and is unhealthy: the kubelet knows
  then that a pod has it still. A MIG device is as healthy as its GPU at best, and unhealthy if the
  kernel lists no capabilities of it, without which no container can have it.
- Where MIG devices matter and NVML does not answer, nothing is known of them, which is an error:
  whoever asks keeps what was told before.
- Shared devices may be some of a resource; then they are another resource, which is called
  NAME.shared if nothing else is said. NVIDIA's plugin shares all of them instead, and says so in
  its log. What is left keeps its name. Several entries may share devices of one resource, each its
  own devices under a name of its own.
- A kubelet is told all of a resource in one message, which holds 4 MiB: gRPC's limit, which no
  kubelet changes. More shares than that are an error.

Source: k8s-device-plugin internal/rm/device_map.go, api/config/v1/replicas.go; NVIDIA's
Multi-Process Service, 2.3.1.1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from hooks.node.capabilities import CONTROL
from integration.agent_errors import (
    MigDevicesUnknown,
    MigLayoutUnsuitable,
    SettingsConflict,
    SharingUnsuitable,
)
from integration.node.settings.readers import resource_name
from integration.node.values.health import HealthState
from integration.node.values.resources import (
    MPS,
    Device,
    Mig,
    Resource,
    Settings,
    SharedResource,
    Sharing,
)

if TYPE_CHECKING:
    from hooks.node.gpus import Gpu, MigDevice
    from hooks.node.inventory import Inventory
    from integration.node.device_health.device_state import Condition

GPU: Final = "nvidia.com/gpu"
"""What whole GPUs are called, and MIG devices that are told of as such."""

# Of gRPC, which no kubelet changes.
_LARGEST_MESSAGE: Final = 4 << 20
# Bytes of an entry of ListAndWatchResponse beside the device's name: tags and lengths (6), health
# ("Unhealthy", 9), and a NUMA node (2 + 2 + 1, and 5 for its number).
_OF_ENTRY: Final = 25

_SHARED_SUFFIX: Final = ".shared"  # what renameByDefault adds

_ASKED: Final = "the resources of this node"

# Before Volta an MPS daemon has 16 clients for each GPU, since then 48.
_VOLTA: Final = (7, 0)
_MOST_BEFORE_VOLTA: Final = 16

_WORSE: Final = {
    state: number
    for number, state in enumerate(
        (HealthState.HEALTHY, HealthState.SUSPECT, HealthState.RECOVERING, HealthState.UNHEALTHY)
    )
}


def resources_of(
    inventory: Inventory,
    settings: Settings,
    health: Mapping[str, Condition] | None = None,
    numa: Mapping[str, int] | None = None,
) -> tuple[Resource, ...]:
    """The resources that a kubelet is told of.

    Args:
        health: what is thought of each device, by UUID; what is not in it is healthy.
        numa: the NUMA node of each GPU, by PCI address, as far as it is known.

    Returns:
        The resources that have a device, GPUs first; the devices of each by index.

    Raises:
        MigDevicesUnknown: there are MIG devices to be told of, and NVML did not say which.
        MigLayoutUnsuitable: the GPUs are cut as the MIG strategy cannot tell.
        SharingUnsuitable: a device cannot be shared so, or not by so many.
        SettingsConflict: two resources would have one name.
    """
    node = _Node(inventory, health or {}, numa or {})
    named = _NAMED[settings.mig_strategy](node)
    found: dict[str, Resource] = {}
    for name, devices in named.items():
        rest, shared = devices, []
        for share in settings.sharing.resources:
            if share.name == name and (chosen := _chosen(node, share, devices)):
                _check_free(share, chosen, rest)
                if settings.sharing.kind == MPS:
                    _check_mps(node, share, chosen)
                _check_size(share, chosen)
                rest = tuple(device for device in rest if device not in chosen)
                shared.append((share, chosen))
        if rest:
            _add(found, Resource(name, rest, original=name))
        for share, chosen in shared:
            new_name = _renamed(share, settings.sharing, partial=bool(rest))
            _add(found, _split(name, new_name, share, settings.sharing, chosen))
    return tuple(found.values())


def unannounced(inventory: Inventory, settings: Settings) -> tuple[str, ...]:
    """Return why GPUs in MIG mode are in no resource, a line each, for people."""
    found = []
    cut = {device.gpu for device in inventory.mig_devices}
    for gpu in _Node(inventory, {}, {}).gpus:
        if not gpu.mig or gpu.lost:
            continue
        if settings.mig_strategy is Mig.NONE:
            found.append(
                f"GPU {gpu.index} is in MIG mode, and migStrategy none announces whole GPUs only: "
                "set migStrategy to mixed or single, or switch MIG mode off"
            )
        elif settings.mig_strategy is Mig.MIXED and gpu.index not in cut:
            found.append(
                f"GPU {gpu.index} is in MIG mode without MIG devices: make some, with "
                "nvidia-smi mig or mig-parted, or switch MIG mode off"
            )
    return tuple(found)


def unmatched(inventory: Inventory, settings: Settings) -> tuple[str, ...]:
    """Which single devices the settings share and the node does not have, a line each, for people.

    One configuration is for many nodes: a resource that this one lacks altogether is no fault.
    """
    node = _Node(inventory, {}, {})
    try:
        named = _NAMED[settings.mig_strategy](node)
    except (MigDevicesUnknown, MigLayoutUnsuitable):
        return ()
    found = []
    for share in settings.sharing.resources:
        devices = named.get(share.name, ())
        if not devices:
            continue
        if share.count is not None and share.count > len(devices):
            found.append(
                f"{share.count} devices of {share.name} are to be shared, and this node has "
                f"{len(devices)}"
            )
        names = {name for device in devices for name in node.names(device)}
        found += [
            f"device {name} of {share.name} is to be shared, and this node has none of that name"
            for name in share.devices or ()
            if name not in names
        ]
    return tuple(found)


# -- devices -----------------------------------------------------------------------------------


class _Node:
    """The node's GPUs and MIG devices, as devices."""

    def __init__(
        self,
        inventory: Inventory,
        health: Mapping[str, Condition],
        numa: Mapping[str, int],
    ) -> None:
        own = _distinct([*inventory.gpus, *inventory.mig_devices])
        self.gpus = [gpu for gpu in inventory.gpus if gpu.uuid in own and not gpu.excluded]
        self.nvml_failure = inventory.nvml_failure
        self.by_uuid = {gpu.uuid: gpu for gpu in self.gpus}
        self._faults = inventory.nodes.faults
        # Without its control node no container gets anything of the driver.
        self._unusable = bool(inventory.drained) or CONTROL.path in self._faults
        self._health = health
        self._numa = numa
        self._mig: dict[int, list[MigDevice]] = {}
        self._former: dict[str, str] = {}
        uuids = {gpu.index: gpu.uuid for gpu in self.gpus}
        for device in inventory.mig_devices:
            if device.uuid in own:
                self._mig.setdefault(device.gpu, []).append(device)
                self._former[device.uuid] = (
                    f"MIG-{uuids.get(device.gpu, '')}"
                    f"/{device.gpu_instance}/{device.compute_instance}"
                )

    def mig_devices(self, gpu: Gpu) -> list[MigDevice]:
        return sorted(self._mig.get(gpu.index, ()), key=lambda device: device.index)

    def whole(self, gpu: Gpu) -> Device:
        return Device(
            id=gpu.uuid,
            uuid=gpu.uuid,
            gpu=gpu.uuid,
            index=str(gpu.index),
            minor=gpu.minor,
            numa_node=self._numa.get(gpu.bus_id),
            memory_bytes=gpu.memory,
            state=self._state(gpu),
        )

    def part(self, gpu: Gpu, device: MigDevice) -> Device:
        lost = device.drained or any(path in self._faults for path in device.paths)
        own = HealthState.UNHEALTHY if lost or not device.caps else self._thought(device.uuid)
        return Device(
            id=device.uuid,
            uuid=device.uuid,
            gpu=gpu.uuid,
            index=f"{gpu.index}:{device.index}",
            minor=gpu.minor,
            numa_node=self._numa.get(gpu.bus_id),
            state=max(own, self._state(gpu), key=_WORSE.__getitem__),
        )

    def names(self, device: Device) -> tuple[str, ...]:
        """What the device may be called in the settings; the last is of drivers before 470."""
        return (device.uuid, device.index, self._former.get(device.uuid, device.uuid))

    def _state(self, gpu: Gpu) -> HealthState:
        if gpu.lost or gpu.drained or self._unusable or gpu.path in self._faults:
            return HealthState.UNHEALTHY
        return self._thought(gpu.uuid)

    def _thought(self, uuid: str) -> HealthState:
        known = self._health.get(uuid)
        return known.state if known is not None else HealthState.HEALTHY

    def check_known(self) -> None:
        """Whether it is known which MIG devices there are."""
        if self.nvml_failure and any(gpu.mig for gpu in self.gpus):
            raise MigDevicesUnknown(
                _ASKED,
                found=f"GPUs in MIG mode, and NVML does not answer: {self.nvml_failure}",
                do="see that nvidia-smi works on the node",
            )


def _distinct(devices: Iterable[Gpu | MigDevice]) -> frozenset[str]:
    """The UUIDs that one device has alone."""
    counts = Counter(device.uuid for device in devices)
    return frozenset(uuid for uuid, count in counts.items() if uuid and count == 1)


_Named = dict[str, tuple[Device, ...]]


def _without_mig(node: _Node) -> _Named:
    whole = tuple(node.whole(gpu) for gpu in node.gpus if not gpu.mig)
    return {GPU: whole} if whole else {}


def _single(node: _Node) -> _Named:
    # What is lost says nothing of its mode any more.
    modes = {gpu.mig for gpu in node.gpus if not gpu.lost}
    if modes != {True}:
        if len(modes) > 1:
            raise MigLayoutUnsuitable(
                f"{_ASKED} with migStrategy single",
                found="GPUs with MIG mode, "
                + ", ".join(str(gpu.index) for gpu in node.gpus if gpu.mig)
                + ", and without, "
                + ", ".join(str(gpu.index) for gpu in node.gpus if not gpu.mig),
                do="switch it on or off for all of them, or use mixed",
            )
        return _without_mig(node)
    node.check_known()
    profiles: dict[str, str] = {}
    found: list[Device] = []
    for gpu in node.gpus:
        parts = node.mig_devices(gpu)
        if not parts and not gpu.lost:
            raise MigLayoutUnsuitable(
                f"{_ASKED} with migStrategy single",
                found=f"GPU {gpu.index} in MIG mode without MIG devices",
                do="make some, with nvidia-smi mig or mig-parted",
            )
        for part in parts:
            profiles.setdefault(part.profile, f"{gpu.index}:{part.index}")
            found.append(node.part(gpu, part))
    if len(profiles) > 1:
        raise MigLayoutUnsuitable(
            f"{_ASKED} with migStrategy single",
            found="MIG devices of more than one profile: "
            + ", ".join(f"{name or 'unknown'} ({where})" for name, where in profiles.items()),
            do="cut all GPUs alike, or use mixed",
        )
    return {GPU: tuple(found)} if found else {}


def _mixed(node: _Node) -> _Named:
    node.check_known()
    found: dict[str, list[Device]] = {}
    for gpu in node.gpus:
        for part in node.mig_devices(gpu) if gpu.mig else ():
            if (name := _mig_name(part.profile)) is not None:
                found.setdefault(name, []).append(node.part(gpu, part))
    return _without_mig(node) | {name: tuple(devices) for name, devices in found.items()}


def _mig_name(profile: str) -> str | None:
    """The resource of a profile ("1g.10gb+me" is "nvidia.com/mig-1g.10gb.me"); None for none."""
    return resource_name(f"mig-{profile.replace('+', '.')}") if profile else None


_NAMED: Final = {Mig.NONE: _without_mig, Mig.SINGLE: _single, Mig.MIXED: _mixed}


# -- sharing -----------------------------------------------------------------------------------


def _add(found: dict[str, Resource], resource: Resource) -> None:
    if resource.name in found:
        raise SettingsConflict(
            _ASKED,
            found=f"{resource.original} and {found[resource.name].original}, both to be called "
            f"{resource.name}",
            do="rename one of them otherwise",
        )
    found[resource.name] = resource


def _chosen(node: _Node, share: SharedResource, devices: Sequence[Device]) -> tuple[Device, ...]:
    if share.devices is not None:
        wanted = frozenset(share.devices)
        return tuple(device for device in devices if not wanted.isdisjoint(node.names(device)))
    return tuple(devices[: share.count])


def _renamed(share: SharedResource, sharing: Sharing, *, partial: bool) -> str:
    if share.rename:
        return share.rename
    return share.name + _SHARED_SUFFIX if sharing.rename_by_default or partial else share.name


def _split(
    name: str, new_name: str, share: SharedResource, sharing: Sharing, devices: Iterable[Device]
) -> Resource:
    shares = tuple(
        replace(device, id=f"{device.uuid}::{number}")
        for device in devices
        for number in range(share.replicas)
    )
    return Resource(
        new_name,
        shares,
        sharing=sharing.kind,
        replicas=share.replicas,
        one_each=sharing.fail_requests_greater_than_one,
        original=name,
    )


def _check_free(share: SharedResource, chosen: Iterable[Device], rest: Collection[Device]) -> None:
    """See that no entry before has shared these: one by the index, the other by the UUID."""
    for device in chosen:
        if device not in rest:
            raise SettingsConflict(
                f"{share.rename or share.name} of {share.name}",
                found=f"device {device.index} ({device.uuid}) is in two entries of the sharing",
                do="leave it in one of them",
            )


def _check_size(share: SharedResource, devices: Sequence[Device]) -> None:
    """See that a kubelet can be told of so many shares at once."""
    last = len(str(share.replicas - 1))
    of_each = [_OF_ENTRY + len(f"{device.uuid}::") + last for device in devices]
    if share.replicas * sum(of_each) > _LARGEST_MESSAGE:
        raise SharingUnsuitable(
            f"{share.replicas} replicas of {share.name}",
            found=f"of {len(devices)} devices they are {share.replicas * len(devices)} shares, and "
            "one message to the kubelet, of 4 MiB, holds fewer",
            do=f"ask for {_LARGEST_MESSAGE // sum(of_each)} at most, or share fewer devices",
        )


def _check_mps(node: _Node, share: SharedResource, devices: Iterable[Device]) -> None:
    asked = f"{share.name} to be shared by MPS"
    for device in devices:
        if device.uuid != device.gpu:
            raise SharingUnsuitable(
                asked,
                found=f"MIG device {device.index}",
                do="share by timeSlicing, or switch MIG mode off",
            )
        gpu = node.by_uuid[device.gpu]
        if share.replicas > _MOST_BEFORE_VOLTA and _is_before_volta(gpu):
            raise SharingUnsuitable(
                asked,
                found=f"{share.replicas} replicas, and GPU {gpu.index} of compute capability "
                f"{gpu.compute_capability}",
                do=f"it has {_MOST_BEFORE_VOLTA} clients at most: ask for fewer",
            )


def _is_before_volta(gpu: Gpu) -> bool:
    major, dot, minor = gpu.compute_capability.partition(".")
    if not dot or not (major.isdecimal() and minor.isdecimal()):
        return False  # NVML did not say
    return (int(major), int(minor)) < _VOLTA


# -- what cannot be looked at ------------------------------------------------------------------


def unhealthy(resources: Iterable[Resource], but: Collection[str] = ()) -> tuple[Resource, ...]:
    """These resources, with their devices unhealthy: what cannot be looked at is not gone.

    A device that a kubelet is no longer told of is gone for it; one that is unhealthy only waits.
    So, on a node that cannot be looked at, every device that was there is unhealthy. While NVML
    does not answer, MIG devices cannot be seen, and whole GPUs, which procfs tells of, are what
    they were.

    Args:
        resources: of which nothing is known now.
        but: UUIDs of devices that are left as they are.
    """
    return tuple(
        replace(
            each,
            devices=tuple(
                device if device.uuid in but else replace(device, state=HealthState.UNHEALTHY)
                for device in each.devices
            ),
        )
        for each in resources
    )
