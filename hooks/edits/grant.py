"""Decide which of the node's devices a container gets, from its request and the inventory.

Rules
- ``all`` means every full GPU that is not in MIG mode, and every MIG device. A GPU without a usable
  node is left out, with a note. It is an error if nothing is left.
- A named device that the container cannot get is an error: a container that requested GPU 3 must
  not start without it.
- A GPU in MIG mode cannot be named as a whole, because its node alone is useless for computing.
- A prefix of a UUID names the only device whose UUID starts with it; several are an error.
- No container gets an excluded GPU: ``all`` leaves it out, and naming it is an error. The same
  applies to a device that is out of service. If the driver is out of service, nothing is granted.
- Devices are in the requested order, each once.
- Every container with any part of the driver gets its control node. If that node is unusable, the
  kernel module is not loaded, and this error comes first. Another node of its capabilities is also
  an error if it exists, is not the kernel's device, and was not recreated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeVar

from api.errors import NvshimError
from api.values import dataclass
from hooks.errors import (
    AmbiguousDevice,
    DeviceNodeMissing,
    GpuExcluded,
    MigModeGpu,
    MigUnknown,
    NoGpus,
    OutOfService,
    UnknownDevice,
    enumerated,
)
from hooks.node.capabilities import CONTROL, nodes_of
from hooks.node.drained import driver_refusal, refusal
from hooks.node.gpus import Gpu, MigDevice
from hooks.node.inventory import Inventory
from hooks.requests.request import Request
from hooks.words import (
    AllDevices,
    DeviceName,
    GpuBusId,
    GpuIndex,
    GpuUuid,
    MigIndex,
    MigInstance,
    MigUuid,
    NamedDevices,
    NoDevices,
    Void,
)

_Found = TypeVar("_Found", "Gpu", "MigDevice")


@dataclass(frozen=True, slots=True)
class Grant:
    """The devices and driver capabilities that a container gets."""

    capabilities: frozenset[str]  # the driver capabilities, of hooks.words.CAPABILITIES
    gpus: tuple[Gpu, ...] = ()
    mig_devices: tuple[MigDevice, ...] = ()
    notes: tuple[str, ...] = ()  # what it does not get, and why, for display


def decide(request: Request, inventory: Inventory) -> Grant:
    """Return the devices that a container gets.

    Args:
        request: a request for some part of the driver.

    Raises:
        UnknownDevice: this node does not have a named device.
        AmbiguousDevice: a prefix of a UUID matches several devices.
        MigModeGpu: a GPU that is named as a whole is in MIG mode.
        GpuExcluded: a named GPU, or the GPU of a named MIG device, is excluded.
        OutOfService: a named device, all devices or the driver are out of service.
        MigUnknown: a MIG device is named, but NVML could not list them.
        NoGpus: all GPUs are requested but the node has none.
        DeviceNodeMissing: a device has no usable node.
    """
    if inventory.drained:
        raise driver_refusal(request.source, inventory.drained)
    _check_node(CONTROL.path, "the driver's control node", inventory)
    for control in nodes_of(request.capabilities):
        # CUDA would fail with an error that is harder to understand.
        if control.path in inventory.nodes.wrong:
            _check_node(control.path, f"the node {control.path}", inventory)
    match request.devices:
        case Void() | NoDevices():
            return Grant(request.capabilities)
        case AllDevices():
            return _all(request.capabilities, inventory)
        case NamedDevices(devices):
            return _named(devices, request.capabilities, inventory)


def _all(capabilities: frozenset[str], inventory: Inventory) -> Grant:
    drained = _drained(inventory)
    notes = [f"{gpu} is excluded by the configuration" for gpu in inventory.gpus if gpu.excluded]
    notes += [f"{device} is out of service {device.drained}" for device in drained]
    faults = []
    gpus = []
    for gpu in inventory.gpus:
        if gpu.mig or gpu.excluded or gpu.drained:
            continue
        if gpu.path in inventory.nodes.usable:
            gpus.append(gpu)
        else:
            faults.append(f"{gpu}: {_fault(gpu.path, inventory)}")
    mig_devices = []
    for device in _of_any(inventory.gpus, inventory.mig_devices):
        missing = [path for path in _paths(device, inventory) if path in inventory.nodes.faults]
        if device.caps and not missing:
            mig_devices.append(device)
        else:
            faults.append(f"{device}: {_fault(missing[0], inventory) if missing else _NO_CAPS}")
    empty = {gpu.index for gpu in inventory.gpus if gpu.mig and not gpu.excluded} - {
        d.gpu for d in inventory.mig_devices
    }
    if empty:
        why = f" known: {inventory.nvml_failure}" if inventory.nvml_failure else ""
        which = enumerated(map(str, sorted(empty)))
        notes.append(f"in MIG mode, and with no MIG device{why}: GPU {which}")
    if not gpus and not mig_devices:
        raise _none_left(notes, faults, inventory, drained=bool(drained))
    return Grant(capabilities, tuple(gpus), tuple(mig_devices), (*notes, *faults))


def _none_left(
    notes: Iterable[str], faults: Iterable[str], inventory: Inventory, *, drained: bool
) -> NvshimError:
    """Return the error if ``all`` results in no device."""
    asked, found = "all GPUs of this node", "; ".join(faults)
    if found:
        return DeviceNodeMissing(
            asked, found=found, do=_for_nodes(_all_paths(inventory), inventory)
        )
    found = "; ".join(notes)
    if drained:
        return OutOfService(asked, found=f"cannot be given: {found}", do=_UNDRAIN)
    return NoGpus(asked, found=found or "this node has no GPU", do=_LOOK)


def _named(
    names: Iterable[DeviceName], capabilities: frozenset[str], inventory: Inventory
) -> Grant:
    gpus: dict[int, Gpu] = {}
    mig_devices: dict[str, MigDevice] = {}
    for name in names:
        match name:
            case GpuIndex() | GpuUuid() | GpuBusId():
                gpu = _gpu(name, inventory)
                if gpu.drained:
                    raise refusal(gpu)
                _check_node(gpu.path, str(gpu), inventory)
                gpus[gpu.index] = gpu
            case MigIndex() | MigUuid() | MigInstance():
                device = _mig_device(name, inventory)
                _check_exclusion(name, inventory.gpus[device.gpu])
                if device.drained:
                    raise refusal(device)
                if not device.caps:
                    raise DeviceNodeMissing(str(device), found=_NO_CAPS, do=_MAKE_NODES)
                for path in _paths(device, inventory):
                    _check_node(path, str(device), inventory)
                mig_devices[device.uuid] = device
    return Grant(capabilities, tuple(gpus.values()), tuple(mig_devices.values()))


def gpus_named(name: DeviceName, inventory: Inventory) -> list[Gpu]:
    """Return the GPUs that a name matches; several only for a prefix of their UUIDs."""
    match name:
        case GpuIndex(index):
            return [gpu for gpu in inventory.gpus if gpu.index == index]
        case GpuBusId(bus_id):
            return [gpu for gpu in inventory.gpus if gpu.bus_id == bus_id]
        case GpuUuid(uuid):
            return [gpu for gpu in inventory.gpus if gpu.uuid.startswith(uuid)]
        case _:
            return []


def mig_devices_named(name: DeviceName, inventory: Inventory) -> list[MigDevice]:
    """Return the MIG devices that a name matches; several only for a prefix of their UUIDs."""
    devices = inventory.mig_devices
    match name:
        case MigIndex(gpu, index):
            return [each for each in devices if (each.gpu, each.index) == (gpu, index)]
        case MigUuid(uuid):
            return [each for each in devices if each.uuid.startswith(uuid)]
        case MigInstance(uuid, gpu_instance, compute_instance):
            of = {gpu.index for gpu in inventory.gpus if gpu.uuid == uuid}
            instances = (gpu_instance, compute_instance)
            return [
                each
                for each in devices
                if each.gpu in of and (each.gpu_instance, each.compute_instance) == instances
            ]
        case _:
            return []


def _gpu(name: GpuIndex | GpuUuid | GpuBusId, inventory: Inventory) -> Gpu:
    found = gpus_named(name, inventory)
    if not found:
        raise _unknown(name, inventory)
    gpu = _only(name, "GPU", found)
    _check_exclusion(name, gpu)
    if gpu.mig:
        raise MigModeGpu(
            f"GPU {name}",
            found="is in MIG mode",
            do=_remedy(gpu, inventory),
        )
    return gpu


def _mig_device(name: MigIndex | MigUuid | MigInstance, inventory: Inventory) -> MigDevice:
    found = mig_devices_named(name, inventory)
    if found:
        return _only(name, "MIG device", found)
    if inventory.nvml_failure:
        raise MigUnknown(
            f"MIG device {name}",
            found=f"which there are is unknown: {inventory.nvml_failure}",
            do="see `nvshim list`, and why NVML fails",
        )
    raise _unknown(name, inventory)


def _only(name: DeviceName, kind: str, found: list[_Found]) -> _Found:
    if len(found) > 1:
        raise AmbiguousDevice(
            f"{kind} {name}",
            found=f"is the start of {enumerated(each.uuid for each in found)}",
            do="write more of the UUID",
        )
    return found[0]


def _drained(inventory: Inventory) -> list[Gpu | MigDevice]:
    """Return the devices out of service, with a GPU in place of its MIG devices."""
    gpus = {gpu.index: gpu for gpu in inventory.gpus if not gpu.excluded}
    parts = (device for device in inventory.mig_devices if device.gpu in gpus)
    return [
        *(gpu for gpu in gpus.values() if gpu.drained),
        *(each for each in parts if each.drained and not gpus[each.gpu].drained),
    ]


def _of_any(gpus: tuple[Gpu, ...], devices: Iterable[MigDevice]) -> list[MigDevice]:
    """Return the MIG devices of GPUs that are not excluded, without those out of service."""
    return [each for each in devices if not (gpus[each.gpu].excluded or each.drained)]


def _check_exclusion(name: DeviceName, gpu: Gpu) -> None:
    if gpu.excluded:
        raise GpuExcluded(
            f"GPU or MIG device {name}",
            found=f"is excluded by the configuration ({gpu})",
            do="name another, or take it out of exclude-gpus",
        )


def _paths(device: MigDevice, inventory: Inventory) -> tuple[str, ...]:
    """Return all nodes that a MIG device needs: those of its GPU and its capabilities."""
    return (inventory.gpus[device.gpu].path, *device.paths)


def _check_node(path: str, whose: str, inventory: Inventory) -> None:
    if path not in inventory.nodes.usable:
        raise DeviceNodeMissing(
            whose,
            found=_fault(path, inventory),
            do=_for_nodes({path}, inventory),
        )


_NO_CAPS = "the kernel lists no capabilities of it in /proc/driver/nvidia-caps/mig-minors"
_MAKE_NODES = "load the driver's kernel modules and create its nodes (nvidia-smi does, as root)"
_RESET = "reset the GPU (nvidia-smi --gpu-reset), or reboot the node"
_REMOVE = "remove what stands in the node's place, then run `nvshim devices create`"
_LOOK = "run `nvshim list` on the node"
_UNDRAIN = "return one to service with `nvshim undrain`, or ask on another node"


def _all_paths(inventory: Inventory) -> set[str]:
    paths = {gpu.path for gpu in inventory.gpus}
    return paths.union(*(device.paths for device in inventory.mig_devices))


def _for_nodes(paths: Collection[str], inventory: Inventory) -> str:
    """Return the remedy for nodes that a container cannot get."""
    nodes = inventory.nodes
    if not nodes.lost.isdisjoint(paths):
        return _RESET
    return _MAKE_NODES if nodes.wrong.isdisjoint(paths) else _REMOVE


def _fault(path: str, inventory: Inventory) -> str:
    return inventory.nodes.faults.get(path, f"no node {path}")


def _unknown(name: DeviceName, inventory: Inventory) -> UnknownDevice:
    """Return the error, which lists the existing devices in the form of the request."""
    kind = "GPU" if isinstance(name, GpuIndex | GpuUuid | GpuBusId) else "MIG device"
    match name:
        case GpuIndex():
            there = enumerated(str(gpu.index) for gpu in inventory.gpus)
            found = f"this node has {there}" if there else "this node has no GPU"
        case GpuUuid():
            there = enumerated(gpu.uuid for gpu in inventory.gpus)
            found = f"this node has {there or 'no GPU'}"
        case GpuBusId():
            there = enumerated(gpu.bus_id for gpu in inventory.gpus)
            found = f"this node has GPUs at {there}" if there else "this node has no GPU"
        case MigIndex(gpu):
            mine = enumerated(f"{d.gpu}:{d.index}" for d in inventory.mig_devices if d.gpu == gpu)
            found = f"GPU {gpu} has {mine}" if mine else f"GPU {gpu} has no MIG devices"
            if gpu >= len(inventory.gpus):
                there = enumerated(str(gpu.index) for gpu in inventory.gpus)
                found = f"there is no GPU {gpu}; this node has {there or 'none'}"
        case MigUuid():
            there = enumerated(device.uuid for device in inventory.mig_devices)
            found = f"this node has {there or 'no MIG device'}"
        case MigInstance():
            there = enumerated(
                f"MIG-{inventory.gpus[d.gpu].uuid}/{d.gpu_instance}/{d.compute_instance}"
                for d in inventory.mig_devices
            )
            found = f"this node has {there or 'no MIG device'}"
    return UnknownDevice(f"{kind} {name}", found=f"does not exist; {found}", do=_LOOK)


def _remedy(gpu: Gpu, inventory: Inventory) -> str:
    devices = [d for d in inventory.mig_devices if d.gpu == gpu.index]
    if devices:
        return f"name one of its MIG devices: {enumerated(f'{d.gpu}:{d.index}' for d in devices)}"
    if inventory.nvml_failure:
        return f"name one of its MIG devices (unknown here: {inventory.nvml_failure})"
    return "make MIG devices on it (nvidia-smi mig -cgi … -C), or turn MIG mode off"
