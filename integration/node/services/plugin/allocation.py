"""What a container is given of a resource: the answer to the kubelet's Allocate. Pure.

============================  ====================================================================
``deviceListStrategy``        what the answer has
============================  ====================================================================
envvar                        NVIDIA_VISIBLE_DEVICES=ID,…; NVIDIA_IMEX_CHANNELS=N,…
volume-mounts                 NVIDIA_VISIBLE_DEVICES=/var/run/nvidia-container-devices, and
                              /dev/null mounted on ID, and on imex/N, in that directory
cdi-annotations               cdi.k8s.io/nvidia-device-plugin_… = VENDOR/gpu=ID,… (or another
                              prefix)
cdi-cri                       the CRI's own field of CDI devices, with the same names
============================  ====================================================================

VENDOR is k8s.device-plugin.nvidia.com, whose specs :mod:`integration.node.services.plugin.cdi`
writes: our shim, and any other runtime, gives by them what it gives by the variable. With CDI, what
comes beside GPUs is named too: VENDOR/gds=all, mofed=all, gdrcopy=all, imex-channel=N. Without, and
only then (as with NVIDIA's), the variables NVIDIA_GDS, NVIDIA_MOFED and NVIDIA_GDRCOPY ask for it,
and ``passDeviceSpecs`` has the device nodes in the answer.

Rules
- Shares of one device are that device; it is named once.
- An id that the resource does not have is refused; so is one whose device the node does not have at
  this moment. One that is unhealthy is not, as with NVIDIA's: the kubelet has chosen by what it was
  told, and who keeps a device over a restart of the kubelet is not to lose it.
- The kubelet records the answer, and the shim goes by the record (:mod:`hooks.requests.policy`). So
  a container gets what it has been given, whatever the way and the mode. Only where the shim is
  told to look at no mounts (``accept-mounts = false``), ``volume-mounts`` gives nothing, and the
  agent says so.
- Of IMEX channels those are named that the node has; where they are required, a missing one is an
  error.

Source: facts of NVIDIA's k8s-device-plugin; device plugin API v1beta1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from api.proto import deviceplugin_pb2 as pb
from hooks.config import Config
from hooks.node.capabilities import CONTROL, MODESET, UVM, UVM_TOOLS
from hooks.node.drained import DRIVER, read_drains
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

if TYPE_CHECKING:
    from hooks.node.inventory import Inventory

VENDOR: Final = "k8s.device-plugin.nvidia.com"
"""Of the CDI kinds, as NVIDIA's plugin calls them."""

IMEX_NODES: Final = "/dev/nvidia-caps-imex-channels"

_USUAL_PREFIX: Final = "cdi.k8s.io/"
_NOTHING: Final = "void"
_VARIABLES: Final = {"gdrcopy": "NVIDIA_GDRCOPY", "gds": "NVIDIA_GDS", "mofed": "NVIDIA_MOFED"}
_CONTROL_NODES: Final = (CONTROL.path, UVM.path, UVM_TOOLS.path, MODESET.path)


@dataclass(frozen=True, slots=True)
class Ground:
    """What answers go by."""

    settings: Settings  # what the plugin is to do
    inventory: Inventory | None  # what the node has now; None if that cannot be told
    config: Config  # what the shim goes by, and where the host's device nodes are
    # the names that the CDI specs have ("k8s.device-plugin.nvidia.com/gpu=…")
    cdi_devices: frozenset[str] = frozenset()
    channels: tuple[int, ...] = ()  # the IMEX channels that the node has


def allocate(
    resource: Resource, ids: Sequence[str], ground: Ground, *, token: str
) -> pb.ContainerAllocateResponse:
    """What one container is given.

    Args:
        ids: what the kubelet has chosen of it.
        token: what no other answer has; it names the annotation.

    Raises:
        DeviceUnknown: the resource has no such id.
        TooManyShares: nobody is to get so many shares.
        DeviceGone: the node has no such device now.
        DeviceDrained: it is out of service.
        CdiDeviceUnwritten: no CDI spec has the device.
        ChannelsMissing: the node lacks a required IMEX channel.
    """
    settings = ground.settings
    devices = _devices(resource, ids)
    for device in devices:
        _refuse_gone(device, ground.inventory)
        _refuse_drained(device, ground)
    names = [_name(device, settings) for device in devices]
    channels = _channels(ground)
    answer = pb.ContainerAllocateResponse()
    strategies = set(settings.device_list_strategies)
    if strategies & CDI:
        _add_cdi(answer, _cdi_names(names, channels, ground), settings, token)
    if not strategies <= CDI:
        _add_variables(answer, names, channels, ground)
        if settings.pass_device_specs:
            _add_nodes(answer, devices, channels, ground)
    return answer


def cdi_name(device: Device, settings: Settings) -> str:
    """Return the full CDI name by which a container gets the device."""
    return f"{VENDOR}/gpu={_name(device, settings)}"


def _name(device: Device, settings: Settings) -> str:
    return device.index if settings.device_id_strategy == DeviceIds.INDEX else device.uuid


def refuse_channels(settings: Settings, channels: Collection[int]) -> None:
    """See whether the node has the IMEX channels that every container has to get.

    Args:
        channels: those that it has.

    Raises:
        ChannelsMissing: it lacks one.
    """
    missing = [channel for channel in settings.imex_channels if channel not in channels]
    if missing and settings.imex_required:
        raise ChannelsMissing(
            f"the IMEX channels {', '.join(map(str, settings.imex_channels))}",
            found=f"the node lacks {', '.join(map(str, missing))}",
            do="make them (nvidia-modprobe -i), or do not require them",
        )


def refuse_ineffective(settings: Settings, config: Config) -> None:
    """See whether our shim would go by what containers are given.

    Raises:
        GrantIneffective: it would not, so that containers would start without their devices.
    """
    strategies = settings.device_list_strategies
    if DeviceList.VOLUME_MOUNTS in strategies and config.accept_mounts is False:
        raise GrantIneffective(
            f"devices by {', '.join(strategies)}",
            found="the shim looks at no mounts (accept-mounts = false)",
            do="run `nvshim config set requests.accept-mounts auto`, or choose cdi-cri or envvar",
        )


# -- which devices ----------------------------------------------------------------------------


def _devices(resource: Resource, ids: Sequence[str]) -> list[Device]:
    """The devices of ids, each once."""
    if resource.one_each and len(ids) > 1:
        raise TooManyShares(
            f"{len(ids)} of {resource.name} for one container",
            found="its devices are shared, and one share each is the most",
            do="ask for 1, or set failRequestsGreaterThanOne to false",
        )
    known = resource.by_id
    found: dict[str, Device] = {}
    for name in ids:
        if name not in known:
            raise DeviceUnknown(
                f"{name} of {resource.name}",
                found=f"there are {len(known)} devices, and none of this id",
                do="see what nvshim list shows; the kubelet has been told what there is",
            )
        found.setdefault(known[name].uuid, known[name])
    return list(found.values())


def _refuse_gone(device: Device, inventory: Inventory | None) -> None:
    if inventory is None:
        why = "what the node has cannot be told now"
    elif inventory.nvml_failure:
        why = f"NVML does not answer: {inventory.nvml_failure}"
    else:
        why = "the node does not have it any more"
    if inventory is None or not _has(inventory, device.uuid):
        raise DeviceGone(f"device {device.uuid}", found=why, do="have the pod made anew")


def _refuse_drained(device: Device, ground: Ground) -> None:
    """The kubelet hears of it a moment later, and the inventory may be as old as that."""
    drains = {drain.device: drain for drain in read_drains(ground.config)}
    drain = drains.get(device.uuid) or drains.get(device.gpu) or drains.get(DRIVER)
    if drain is not None:
        raise DeviceDrained(
            f"device {device.uuid}",
            found=f"is out of service {drain.why}",
            do="have the pod made anew; it gets another device, or another node",
        )


def _has(inventory: Inventory, uuid: str) -> bool:
    gpus = (gpu.uuid for gpu in inventory.gpus if not gpu.excluded)
    return uuid in gpus or any(uuid == mig.uuid for mig in inventory.mig_devices)


def _channels(ground: Ground) -> list[int]:
    refuse_channels(ground.settings, ground.channels)
    return [channel for channel in ground.settings.imex_channels if channel in ground.channels]


# -- how they are told ------------------------------------------------------------------------


def _cdi_names(names: Iterable[str], channels: Iterable[int], ground: Ground) -> list[str]:
    needed = [f"{VENDOR}/gpu={name}" for name in names]
    for name in needed:
        if name not in ground.cdi_devices:
            raise CdiDeviceUnwritten(
                f"the CDI device {name}",
                found="no spec of it has been written",
                do="see what the agent says of the spec, and who may write there",
            )
    beside = [f"{VENDOR}/{feature}=all" for feature in ground.settings.features]
    beside += [f"{VENDOR}/imex-channel={channel}" for channel in channels]
    # A node that has nothing of the kind has no spec of it, and images are the same everywhere.
    return [*needed, *(name for name in beside if name in ground.cdi_devices)]


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
    ground: Ground,
) -> None:
    settings = ground.settings
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
    ground: Ground,
) -> None:
    inventory = ground.inventory
    if inventory is None:  # then there are no devices either
        return
    own: dict[str, None] = {}
    for device in devices:
        own[f"/dev/nvidia{device.minor}"] = None
        for mig in inventory.mig_devices:
            if mig.uuid == device.uuid:
                own.update(dict.fromkeys(mig.paths))
    own.update(dict.fromkeys(f"{IMEX_NODES}/channel{channel}" for channel in channels))
    there = [path for path in _CONTROL_NODES if path in inventory.nodes.usable]
    for path in (*there, *own):
        answer.devices.add(
            container_path=path, host_path=_host_path(path, inventory, ground), permissions="rw"
        )


def _host_path(path: str, inventory: Inventory, ground: Ground) -> str:
    root = ground.settings.dev_root.rstrip("/")
    if root:
        return f"{root}{path}"
    node = inventory.nodes.usable.get(path)
    if node is not None and node.host:
        return node.host
    return ground.config.dev + path.removeprefix("/dev")
