"""Derive the node's resources and their devices from the inventory, the settings and the health.

Rules
- ``migStrategy: none`` announces the GPUs that are not in MIG mode. ``single`` announces MIG
  devices as GPUs; either all GPUs or none must be in MIG mode, each needs a MIG device, and all MIG
  devices must have the same profile. ``mixed`` announces MIG devices by profile, and the GPUs that
  are not in MIG mode.
- A GPU in MIG mode is never announced as a whole device: CUDA cannot use it without a MIG device,
  and the shim refuses it. NVIDIA's plugin announces it with ``none``, and its pods start with a GPU
  that CUDA does not find.
- A GPU in MIG mode without instances is an error with ``single``, because the node would look like
  another kind of node. With ``mixed`` it has no device, and the other GPUs are not affected.
- A GPU instance with several compute instances results in a resource for each profile
  ("mig-1c.3g.40gb"). NVIDIA's plugin fails in this case.
- The id of a device is its UUID, and the id of a share is UUID::N. A device is not announced if it
  has no UUID, if another device has the same UUID, or if the configuration excludes it.
- A device that is lost, has lost its device node, or is out of service stays in the list as
  unhealthy, so that the kubelet knows that a pod still holds it. A MIG device is at best as healthy
  as its GPU. It is unhealthy if the kernel lists no capabilities for it: no container could use it.
- If NVML does not answer on a node with MIG devices, they are unknown. That is an error; the caller
  keeps the previous list.
- An entry may share some of a resource's devices. These become another resource, by default called
  NAME.shared; the rest keeps its name. (NVIDIA's plugin shares all of them and logs that.) Several
  entries may share different devices of one resource, each with its own number of replicas, under
  separate names or under one.
- The kubelet receives all devices of a resource in one message. gRPC limits it to 4 MiB by default,
  and no kubelet changes that. More shares than fit are an error.

Source: k8s-device-plugin internal/rm/device_map.go, api/config/v1/replicas.go; NVIDIA's
Multi-Process Service, 2.3.1.1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from hooks.node.capabilities import CONTROL
from hooks.node.gpus import Gpu, MigDevice
from hooks.node.inventory import Inventory
from integration.agent_errors import (
    MigDevicesUnknown,
    MigLayoutUnsuitable,
    SettingsConflict,
    SharingUnsuitable,
)
from integration.node.device_health.device_state import Condition
from integration.node.settings.readers import resource_name
from integration.node.values.health import HealthState
from integration.node.values.resources import (
    MPS,
    PATTERN,
    Device,
    Mig,
    Resource,
    Settings,
    SharedResource,
    Sharing,
)

GPU: Final = "nvidia.com/gpu"
"""The resource of whole GPUs, and of MIG devices with ``migStrategy: single``."""

# gRPC's default limit, which no kubelet changes.
_LARGEST_MESSAGE: Final = 4 << 20
# Bytes of an entry of ListAndWatchResponse without the device's id: tags and lengths (6), health
# ("Unhealthy", 9), and a NUMA node (2 + 2 + 1, and 5 for its number).
_ENTRY_SIZE: Final = 25

_SHARED_SUFFIX: Final = ".shared"  # what renameByDefault adds

_ASKED: Final = "the resources of this node"

# An MPS daemon allows 16 clients on each GPU before Volta, and 48 since.
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
    """Return the resources to announce to the kubelet.

    Args:
        health: the condition of each device by UUID; a device that is missing here is healthy.
        numa: the NUMA node of each GPU, by PCI address, where it is known.

    Returns:
        The resources that have a device, GPUs first; the devices of each in the order of indices.

    Raises:
        MigDevicesUnknown: the node has MIG devices, and NVML does not list them.
        MigLayoutUnsuitable: the MIG layout does not fit the MIG strategy.
        SharingUnsuitable: a device does not support the sharing, or that many replicas.
        SettingsConflict: two resources would have the same name.
    """
    node = _Node(inventory, health or {}, numa or {})
    named = _NAMED[settings.mig_strategy](node)
    resources: dict[str, Resource] = {}
    for name, devices in named.items():
        rest, shared = devices, []
        for share in settings.sharing.resources:
            if share.name == name and (chosen := _chosen(node, share, devices)):
                _check_free(share, chosen, rest)
                if settings.sharing.kind == MPS:
                    _check_mps(node, share, chosen)
                rest = tuple(device for device in rest if device not in chosen)
                shared.append((share, chosen))
        if rest:
            _add(resources, Resource(name, rest, original=name))
        renamed: dict[str, dict[str, int]] = {}
        for share, chosen in shared:
            new_name = _renamed(share, settings.sharing, partial=bool(rest))
            replicas = dict.fromkeys((device.uuid for device in chosen), share.replicas)
            renamed.setdefault(new_name, {}).update(replicas)
        for new_name, replicas in renamed.items():
            _check_size(name, replicas)
            _add(resources, _split(name, new_name, replicas, settings.sharing, devices))
    return tuple(resources.values())


def unannounced(inventory: Inventory, settings: Settings) -> tuple[str, ...]:
    """Return a line for the log for each GPU in MIG mode that no resource contains: why."""
    lines = []
    cut = {device.gpu for device in inventory.mig_devices}
    for gpu in _Node(inventory, {}, {}).gpus:
        if not gpu.mig or gpu.lost:
            continue
        if settings.mig_strategy is Mig.NONE:
            lines.append(
                f"GPU {gpu.index} is in MIG mode, and migStrategy none announces whole GPUs only: "
                "set migStrategy to mixed or single, or switch MIG mode off"
            )
        elif settings.mig_strategy is Mig.MIXED and gpu.index not in cut:
            lines.append(
                f"GPU {gpu.index} is in MIG mode without MIG devices: create some with "
                "nvidia-smi mig or mig-parted, or switch MIG mode off"
            )
    return tuple(lines)


def unmatched(inventory: Inventory, settings: Settings) -> tuple[str, ...]:
    """Return a line for the log for each device that the settings share and the node lacks.

    One configuration serves many nodes: a resource that this node lacks entirely is not a fault.
    """
    node = _Node(inventory, {}, {})
    try:
        named = _NAMED[settings.mig_strategy](node)
    except (MigDevicesUnknown, MigLayoutUnsuitable):
        return ()
    lines = []
    for share in settings.sharing.resources:
        devices = named.get(share.name, ())
        if not devices:
            continue
        if share.count is not None and share.count > len(devices):
            lines.append(
                f"the settings share {share.count} devices of {share.name}, and this node has "
                f"{len(devices)}"
            )
        names = {name for device in devices for name in node.names(device)}
        lines += [
            f"the settings share device {name} of {share.name}, and this node has no such device"
            for name in share.devices or ()
            if name not in names and PATTERN not in name
        ]
    return tuple(lines)


# -- devices -----------------------------------------------------------------------------------


class _Node:
    """The node's GPUs and MIG devices, converted to :class:`Device`."""

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
        # Without the driver's control node no container can use a GPU.
        self._unusable = bool(inventory.drained) or CONTROL.path in self._faults
        self._health = health
        self._numa = numa
        self._mig: dict[int, list[MigDevice]] = {}
        self._legacy_names: dict[str, str] = {}
        uuids = {gpu.index: gpu.uuid for gpu in self.gpus}
        for device in inventory.mig_devices:
            if device.uuid in own:
                self._mig.setdefault(device.gpu, []).append(device)
                self._legacy_names[device.uuid] = (
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
        own = HealthState.UNHEALTHY if lost or not device.caps else self._own_state(device.uuid)
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
        """Return the names for a device in the settings; the last is that of drivers before 470."""
        return (device.uuid, device.index, self._legacy_names.get(device.uuid, device.uuid))

    def _state(self, gpu: Gpu) -> HealthState:
        if gpu.lost or gpu.drained or self._unusable or gpu.path in self._faults:
            return HealthState.UNHEALTHY
        return self._own_state(gpu.uuid)

    def _own_state(self, uuid: str) -> HealthState:
        known = self._health.get(uuid)
        return known.state if known is not None else HealthState.HEALTHY

    def check_known(self) -> None:
        """Raise MigDevicesUnknown if the node has MIG devices that NVML does not list."""
        if self.nvml_failure and any(gpu.mig for gpu in self.gpus):
            raise MigDevicesUnknown(
                _ASKED,
                found=f"GPUs in MIG mode, and NVML does not answer: {self.nvml_failure}",
                do="check that nvidia-smi works on the node",
            )


def _distinct(devices: Iterable[Gpu | MigDevice]) -> frozenset[str]:
    """Return the UUIDs that exactly one device has."""
    counts = Counter(device.uuid for device in devices)
    return frozenset(uuid for uuid, count in counts.items() if uuid and count == 1)


_Named = dict[str, tuple[Device, ...]]


def _without_mig(node: _Node) -> _Named:
    whole = tuple(node.whole(gpu) for gpu in node.gpus if not gpu.mig)
    return {GPU: whole} if whole else {}


def _single(node: _Node) -> _Named:
    # A lost GPU no longer reports its mode.
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
    devices: list[Device] = []
    for gpu in node.gpus:
        parts = node.mig_devices(gpu)
        if not parts and not gpu.lost:
            raise MigLayoutUnsuitable(
                f"{_ASKED} with migStrategy single",
                found=f"GPU {gpu.index} in MIG mode without MIG devices",
                do="create some with nvidia-smi mig or mig-parted",
            )
        for part in parts:
            profiles.setdefault(part.profile, f"{gpu.index}:{part.index}")
            devices.append(node.part(gpu, part))
    if len(profiles) > 1:
        raise MigLayoutUnsuitable(
            f"{_ASKED} with migStrategy single",
            found="MIG devices of more than one profile: "
            + ", ".join(f"{name or 'unknown'} ({where})" for name, where in profiles.items()),
            do="give all GPUs the same MIG layout, or use mixed",
        )
    return {GPU: tuple(devices)} if devices else {}


def _mixed(node: _Node) -> _Named:
    node.check_known()
    by_name: dict[str, list[Device]] = {}
    for gpu in node.gpus:
        for part in node.mig_devices(gpu) if gpu.mig else ():
            if (name := _mig_name(part.profile)) is not None:
                by_name.setdefault(name, []).append(node.part(gpu, part))
    return _without_mig(node) | {name: tuple(devices) for name, devices in by_name.items()}


def _mig_name(profile: str) -> str | None:
    """Return the resource of a profile ("1g.10gb+me": "nvidia.com/mig-1g.10gb.me"), or None."""
    return resource_name(f"mig-{profile.replace('+', '.')}") if profile else None


_NAMED: Final = {Mig.NONE: _without_mig, Mig.SINGLE: _single, Mig.MIXED: _mixed}


# -- sharing -----------------------------------------------------------------------------------


def _add(resources: dict[str, Resource], resource: Resource) -> None:
    if resource.name in resources:
        raise SettingsConflict(
            _ASKED,
            found=f"{resource.original} and {resources[resource.name].original} would both be "
            f"called {resource.name}",
            do="rename one of them",
        )
    resources[resource.name] = resource


def _chosen(node: _Node, share: SharedResource, devices: Sequence[Device]) -> tuple[Device, ...]:
    if share.devices is None:
        return tuple(devices[: share.count])
    return tuple(
        each for each in devices if share.lists(node.names(each), node.by_uuid[each.gpu].model)
    )


def _renamed(share: SharedResource, sharing: Sharing, *, partial: bool) -> str:
    if share.rename:
        return share.rename
    return share.name + _SHARED_SUFFIX if sharing.rename_by_default or partial else share.name


def _split(
    name: str,
    new_name: str,
    replicas: Mapping[str, int],
    sharing: Sharing,
    devices: Iterable[Device],
) -> Resource:
    """Return a shared resource.

    Args:
        replicas: the number of replicas, by the UUIDs of its devices.
        devices: the devices of the original resource, in the order of indices.
    """
    shares = tuple(
        device._replace(id=f"{device.uuid}::{number}")
        for device in devices
        for number in range(replicas.get(device.uuid, 0))
    )
    return Resource(
        new_name,
        shares,
        sharing=sharing.kind,
        replicas=max(replicas.values()),
        one_each=sharing.fail_requests_greater_than_one,
        original=name,
    )


def _check_free(share: SharedResource, chosen: Iterable[Device], rest: Collection[Device]) -> None:
    """Check that no earlier entry shares these: one may use the index, the other the UUID."""
    for device in chosen:
        if device not in rest:
            raise SettingsConflict(
                f"{share.rename or share.name} of {share.name}",
                found=f"two entries share device {device.index} ({device.uuid})",
                do="remove it from one of them",
            )


def _check_size(name: str, replicas: Mapping[str, int]) -> None:
    """Check that all shares fit into one message to the kubelet.

    Args:
        name: the name of the original resource.
        replicas: the number of replicas, by the UUIDs of the devices.
    """
    sizes = {
        uuid: _ENTRY_SIZE + len(f"{uuid}::") + len(str(number - 1))
        for uuid, number in replicas.items()
    }
    if sum(number * sizes[uuid] for uuid, number in replicas.items()) > _LARGEST_MESSAGE:
        most = _LARGEST_MESSAGE // sum(sizes.values())
        raise SharingUnsuitable(
            f"{max(replicas.values())} replicas of {name}",
            found=f"{len(replicas)} devices have {sum(replicas.values())} shares then, which "
            "exceed the 4 MiB of one message to the kubelet",
            do=f"set at most {most} replicas, or share fewer devices",
        )


def _check_mps(node: _Node, share: SharedResource, devices: Iterable[Device]) -> None:
    asked = f"to share {share.name} by MPS"
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
                do=f"set at most {_MOST_BEFORE_VOLTA} replicas, the limit before Volta",
            )


def _is_before_volta(gpu: Gpu) -> bool:
    major, dot, minor = gpu.compute_capability.partition(".")
    if not dot or not (major.isdecimal() and minor.isdecimal()):
        return False  # NVML did not report it
    return (int(major), int(minor)) < _VOLTA


# -- devices that cannot be read ---------------------------------------------------------------


def unhealthy(resources: Iterable[Resource], but: Collection[str] = ()) -> tuple[Resource, ...]:
    """Return the resources with their devices unhealthy.

    If a device is missing from the list, the kubelet considers it gone; an unhealthy one may come
    back. So while the node's devices cannot be read, every previous device is announced as
    unhealthy. If only NVML does not answer, MIG devices are unknown, but procfs still lists the
    whole GPUs, which keep their state.

    Args:
        resources: the previous resources.
        but: the UUIDs of devices that keep their state.
    """
    return tuple(
        replace(
            each,
            devices=tuple(
                device if device.uuid in but else device._replace(state=HealthState.UNHEALTHY)
                for device in each.devices
            ),
        )
        for each in resources
    )
