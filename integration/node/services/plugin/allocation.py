"""The response to the kubelet's Allocate: how a container receives its devices. Pure.

============================  ====================================================================
``deviceListStrategy``        content of the response
============================  ====================================================================
envvar                        NVIDIA_VISIBLE_DEVICES=ID,…; NVIDIA_IMEX_CHANNELS=N,…
volume-mounts                 NVIDIA_VISIBLE_DEVICES=/var/run/nvidia-container-devices, and
                              /dev/null mounted on ID, and on imex/N, in that directory
cdi-annotations               cdi.k8s.io/nvidia-device-plugin_… = VENDOR/gpu=ID,… (or another
                              prefix)
cdi-cri                       the CRI's own field of CDI devices, with the same names
============================  ====================================================================

VENDOR is k8s.device-plugin.nvidia.com. :mod:`integration.node.services.plugin.cdi` writes its CDI
specs; our shim and any other runtime inject the same devices from them as from the variable. With
CDI, the response also names the extra features: VENDOR/gds=all, mofed=all, gdrcopy=all,
imex-channel=N. Without CDI (as in NVIDIA's plugin), the variables NVIDIA_GDS, NVIDIA_MOFED and
NVIDIA_GDRCOPY request them, and ``passDeviceSpecs`` adds the device nodes to the response.

Rules
- Several shares of one device name that device once.
- An id that the resource does not have is refused, and so is a device that the node lacks at this
  moment. An unhealthy device is allowed, as in NVIDIA's plugin: the kubelet chose from the list it
  had, and a container that keeps its device during a restart of the kubelet must not lose it.
- The kubelet records the response, and the shim honours that record (:mod:`hooks.requests.policy`).
  So a container receives its devices with every strategy and mode. The exception: a shim that
  ignores mounts (``accept-mounts = false``) injects nothing for ``volume-mounts``; the agent
  reports that.
- A MIG device whose UUID is not valid in CDI (drivers before 470) has its index as its CDI name.
- The response names the IMEX channels that the node has. If channels are required, a missing one
  is an error.

Source: NVIDIA's k8s-device-plugin (observed behaviour); device plugin API v1beta1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from api.proto import deviceplugin_pb2 as pb
from api.values import dataclass
from hooks.cdi.spec import fault_of
from hooks.config import Config
from hooks.node.capabilities import CONTROL, MODESET, UVM, UVM_TOOLS
from hooks.node.drained import DRIVER, read_drains, reasons_by_device
from hooks.node.inventory import Inventory
from hooks.requests.places import DEVICES, MOUNTS
from integration.agent_errors import (
    CdiDeviceUnwritten,
    ChannelsMissing,
    DeviceDrained,
    DeviceGone,
    DeviceUnknown,
    GrantIneffective,
    TooManyShares,
)
from integration.node.values.resources import (
    CDI,
    PLUGIN,
    Device,
    DeviceIds,
    DeviceList,
    Resource,
    Settings,
)

VENDOR: Final = "k8s.device-plugin.nvidia.com"
"""The vendor part of the CDI kinds, the same as in NVIDIA's plugin."""

IMEX_NODES: Final = "/dev/nvidia-caps-imex-channels"

_USUAL_PREFIX: Final = "cdi.k8s.io/"
_NOTHING: Final = "void"
_VARIABLES: Final = {"gdrcopy": "NVIDIA_GDRCOPY", "gds": "NVIDIA_GDS", "mofed": "NVIDIA_MOFED"}
_CONTROL_NODES: Final = (CONTROL.path, UVM.path, UVM_TOOLS.path, MODESET.path)


@dataclass(frozen=True, slots=True)
class AllocationContext:
    """The state of the node that a response depends on."""

    settings: Settings
    inventory: Inventory | None  # the node's devices now; None if the agent cannot read them
    config: Config  # the shim's configuration, with the directory of the host's device nodes
    # full names of the devices in the CDI specs ("k8s.device-plugin.nvidia.com/gpu=…")
    cdi_devices: frozenset[str] = frozenset()
    channels: tuple[int, ...] = ()  # the IMEX channels that the node has


def allocate(
    resource: Resource, ids: Sequence[str], context: AllocationContext, *, token: str
) -> pb.ContainerAllocateResponse:
    """Return the response for one container.

    Args:
        ids: the ids of the resource that the kubelet chose.
        token: unique to this response; it becomes part of the annotation's key.

    Raises:
        DeviceUnknown: the resource has no such id.
        TooManyShares: the settings allow one share for each container.
        DeviceGone: the node no longer has the device, or the device has just got another index and
            the response would name it by the old one.
        DeviceDrained: the device is out of service.
        CdiDeviceUnwritten: no CDI spec contains the device, or a required IMEX channel.
        ChannelsMissing: the node lacks a required IMEX channel.
    """
    settings = context.settings
    devices = _devices(resource, ids)
    for device in devices:
        _refuse_gone(device, context)
    _refuse_drained(devices, context)
    channels = _channels(context)
    answer = pb.ContainerAllocateResponse()
    strategies = set(settings.device_list_strategies)
    if strategies & CDI:
        _add_cdi(answer, _cdi_names(devices, channels, context), settings, token)
    if not strategies <= CDI:
        names = [_name(device, settings) for device in devices]
        _add_variables(answer, names, channels, context)
        if settings.pass_device_specs:
            _add_nodes(answer, devices, channels, context)
    return answer


def cdi_name(device: Device, settings: Settings) -> str:
    """Return the device's full CDI name."""
    name = device.index if _has_index_in_cdi(device, settings) else device.uuid
    return f"{VENDOR}/gpu={name}"


def _has_index_in_cdi(device: Device, settings: Settings) -> bool:
    is_by_index = settings.device_id_strategy == DeviceIds.INDEX
    return is_by_index or bool(fault_of("device", device.uuid))


def required_channel_names(settings: Settings) -> list[str]:
    """Return the full CDI names of the IMEX channels that every container requires."""
    channels = settings.imex_channels if settings.imex_required else ()
    return [f"{VENDOR}/imex-channel={channel}" for channel in channels]


def _name(device: Device, settings: Settings) -> str:
    return device.index if settings.device_id_strategy == DeviceIds.INDEX else device.uuid


def refuse_channels(settings: Settings, channels: Collection[int]) -> None:
    """Check that the node has the IMEX channels that every container requires.

    Args:
        channels: the channels of the node.

    Raises:
        ChannelsMissing: a required channel is missing.
    """
    missing = [channel for channel in settings.imex_channels if channel not in channels]
    if missing and settings.imex_required:
        raise ChannelsMissing(
            f"the IMEX channels {', '.join(map(str, settings.imex_channels))}",
            found=f"the node lacks {', '.join(map(str, missing))}",
            do="create them (nvidia-modprobe -i), or do not require them",
        )


def refuse_ineffective(settings: Settings, config: Config) -> None:
    """Check that our shim honours the configured strategies.

    Raises:
        GrantIneffective: the shim would ignore them, and containers would start without devices.
    """
    strategies = settings.device_list_strategies
    if DeviceList.VOLUME_MOUNTS in strategies and config.accept_mounts is False:
        raise GrantIneffective(
            f"devices by {', '.join(strategies)}",
            found="the shim ignores mounts (accept-mounts = false)",
            do="run `nvshim config set requests.accept-mounts auto`, or choose cdi-cri or envvar",
        )


# -- which devices ----------------------------------------------------------------------------


def _devices(resource: Resource, ids: Sequence[str]) -> list[Device]:
    """Return the devices that the ids stand for, each once."""
    if resource.one_each and len(ids) > 1:
        raise TooManyShares(
            f"{len(ids)} of {resource.name} for one container",
            found="its devices are shared, and a container may have one share",
            do="request 1, or set failRequestsGreaterThanOne to false",
        )
    known = resource.by_id
    devices: dict[str, Device] = {}
    for name in ids:
        if name not in known:
            raise DeviceUnknown(
                f"{name} of {resource.name}",
                found=f"none of the {len(known)} devices has this id",
                do="run nvshim list; the kubelet has already received the current list",
            )
        devices.setdefault(known[name].uuid, known[name])
    return list(devices.values())


def _refuse_gone(device: Device, context: AllocationContext) -> None:
    inventory = context.inventory
    index = None if inventory is None else _index(inventory, device.uuid)
    if inventory is None:
        why = "the agent cannot read the node's devices now"
    elif index is not None:
        if index == device.index or not _has_index_in_cdi(device, context.settings):
            return
        why = f"its index {device.index} has just become {index}"
    elif inventory.nvml_failure:
        why = f"NVML does not answer: {inventory.nvml_failure}"
    else:
        why = "the node no longer has it"
    raise DeviceGone(
        f"device {device.uuid}", found=why, do="delete the pod; its controller recreates it"
    )


def _refuse_drained(devices: Iterable[Device], context: AllocationContext) -> None:
    """Refuse drained devices; the kubelet and the inventory may not know of a drain yet."""
    inventory, drains = context.inventory, read_drains(context.config)
    if inventory is None:  # allocate has already refused every device
        return
    reasons = reasons_by_device(inventory.gpus, inventory.mig_devices, drains)
    for device in devices:
        names = (device.uuid, device.gpu, DRIVER)
        if why := next((reasons[name] for name in names if name in reasons), ""):
            raise DeviceDrained(
                f"device {device.uuid}",
                found=f"is out of service {why}",
                do="delete the pod; its controller recreates it with another device or on another "
                "node",
            )


def _index(inventory: Inventory, uuid: str) -> str | None:
    """Return the index of a device; None if the node does not have it."""
    for gpu in inventory.gpus:
        if gpu.uuid == uuid and not gpu.excluded:
            return str(gpu.index)
    for mig in inventory.mig_devices:
        if mig.uuid == uuid:
            return f"{mig.gpu}:{mig.index}"
    return None


def _channels(context: AllocationContext) -> list[int]:
    refuse_channels(context.settings, context.channels)
    return [channel for channel in context.settings.imex_channels if channel in context.channels]


# -- how the container receives them ----------------------------------------------------------


def _cdi_names(
    devices: Iterable[Device], channels: Iterable[int], context: AllocationContext
) -> list[str]:
    needed = [cdi_name(device, context.settings) for device in devices]
    required = required_channel_names(context.settings)
    for name in (*needed, *required):
        if name not in context.cdi_devices:
            raise CdiDeviceUnwritten(
                f"the CDI device {name}",
                found="no CDI spec contains it",
                do="read the agent's log about the spec, and check that the directory is writable",
            )
    extra = [f"{VENDOR}/{feature}=all" for feature in context.settings.features]
    extra += [f"{VENDOR}/imex-channel={channel}" for channel in channels]
    # A node without the feature has no spec for it. Leave it out instead of failing: the same
    # settings apply to many nodes.
    return [*needed, *(name for name in extra if name in context.cdi_devices)]


def _add_cdi(
    answer: pb.ContainerAllocateResponse, names: Sequence[str], settings: Settings, token: str
) -> None:
    if not names:
        return
    if DeviceList.CDI_ANNOTATIONS in settings.device_list_strategies:
        prefix = settings.cdi_annotation_prefix or _USUAL_PREFIX
        answer.annotations[f"{prefix}{PLUGIN}_{token}"] = ",".join(names)
    if DeviceList.CDI_CRI in settings.device_list_strategies:
        for name in names:
            answer.cdi_devices.add(name=name)


def _add_variables(
    answer: pb.ContainerAllocateResponse,
    names: Sequence[str],
    channels: Sequence[int],
    context: AllocationContext,
) -> None:
    settings = context.settings
    strategies = set(settings.device_list_strategies)
    by_mounts = DeviceList.VOLUME_MOUNTS in strategies
    answer.envs[DEVICES] = MOUNTS if by_mounts else ",".join(names) or _NOTHING
    if DeviceList.ENVVAR in strategies and channels:
        answer.envs["NVIDIA_IMEX_CHANNELS"] = ",".join(map(str, channels))
    if by_mounts:
        for name in (*names, *(f"imex/{channel}" for channel in channels)):
            answer.mounts.add(host_path="/dev/null", container_path=f"{MOUNTS}/{name}")
    for feature in settings.features:
        answer.envs[_VARIABLES[feature]] = "enabled"


def _add_nodes(
    answer: pb.ContainerAllocateResponse,
    devices: Iterable[Device],
    channels: Iterable[int],
    context: AllocationContext,
) -> None:
    inventory = context.inventory
    if inventory is None:  # allocate has already refused every device
        return
    own: dict[str, None] = {}
    for device in devices:
        own[f"/dev/nvidia{device.minor}"] = None
        for mig in inventory.mig_devices:
            if mig.uuid == device.uuid:
                own.update(dict.fromkeys(mig.paths))
    own.update(dict.fromkeys(f"{IMEX_NODES}/channel{channel}" for channel in channels))
    control = [path for path in _CONTROL_NODES if path in inventory.nodes.usable]
    for path in (*control, *own):
        answer.devices.add(
            container_path=path, host_path=_host_path(path, inventory, context), permissions="rw"
        )


def _host_path(path: str, inventory: Inventory, context: AllocationContext) -> str:
    root = context.settings.dev_root.rstrip("/")
    if root:
        return f"{root}{path}"
    node = inventory.nodes.usable.get(path)
    if node is not None and node.host:
        return node.host
    return context.config.dev + path.removeprefix("/dev")
