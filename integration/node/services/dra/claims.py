"""Read a claim's allocation and configuration, and check that it may have its devices. Pure.

============================================  =============  ====================================
apiVersion of an opaque configuration         kind           for
============================================  =============  ====================================
resource.nvidia.com/v1beta1                   GpuConfig      whole GPUs, as in NVIDIA's driver
resource.nvidia.com/v1beta1                   MigDevice-     MIG devices, as in NVIDIA's driver
                                              Config
gpu.containerd-shim-nvidia/v1beta1            DeviceSharing  both; the same in fewer words
============================================  =============  ====================================

Rules
- The scheduler chooses devices; the claim's ``status.allocation`` has them. The driver ignores the
  results of other drivers.
- The UID of the claim must be the one in the kubelet's call, since the name may now be another
  claim's.
- A device, or a part of it, goes to one claim only: the scheduler may allocate it twice because of
  a race. Claims with ``adminAccess`` only monitor a device, and take nothing from others. Shares of
  a device are limited by their sum (:mod:`.sharing`). A MIG device that the driver creates has no
  shares.
- A device that is out of service goes to no new claim. Claims keep the devices that they have.
- Configurations of other drivers are ignored; one without a driver is an error. The driver's own
  configurations are read strictly, even if no device uses them: an unknown key would be a setting
  that has no effect. VfioDeviceConfig is refused: this driver passes no GPU to a virtual machine.
- If several configurations name a device's request, the last one counts; those of the claim come
  after those of its class. A configuration that names no request applies to all devices of its
  kind. It is an error to name a request for devices of another kind.
- 0 percent of the threads means the daemon's default of 100, because the daemon does not accept 0.

Source: Kubernetes, resource.k8s.io/v1 ResourceClaim; dynamic-resource-allocation/kubeletplugin;
kubernetes-sigs/dra-driver-nvidia-gpu, api/nvidia.com/resource/v1beta1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from hooks.node.drained import DRIVER
from integration.agent_errors import (
    ClaimConfigUnknown,
    ClaimedDeviceMissing,
    DeviceDrained,
    DeviceTaken,
    ResourceClaimUnusable,
)
from integration.node.services.dra.devices import Device
from integration.node.services.dra.sharing import (
    MPS,
    OURS,
    AllocatedDevice,
    Configuration,
    SharingRequest,
    configured,
    consumed,
    refuse_conflicts,
    refuse_overfull,
)
from integration.node.values.claims import (
    ALL,
    GPU,
    INTERVALS,
    MEBI,
    MIG,
    Claim,
    ClaimDevice,
    Reference,
    Sharing,
    parse_quantity,
)

_Reader = Callable[[object, str], Any]

_POD_CLAIM: Final = "resource.kubernetes.io/pod-claim-name"
_LABEL: Final = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)

__all__ = ["allocated_devices", "read_all", "read_claim", "refuse_taken", "refuse_unavailable"]


def read_claim(
    found: Mapping[str, Any],
    reference: Reference,
    driver: str,
    pool: str,
    devices: Mapping[str, Device] | None,
) -> Claim:
    """Return the claim with the devices of this driver that were allocated to it.

    Args:
        found: the ResourceClaim.
        devices: the node's devices by name; None while they are unknown.

    Raises:
        ResourceClaimUnusable: it is another claim, or has no allocation.
        ClaimedDeviceMissing: this node does not have one of its devices.
        ClaimConfigUnknown: a configuration is unknown or impossible.
    """
    asked = f"the {reference}"
    if devices is None:
        raise ClaimedDeviceMissing(
            f"the devices of {asked}",
            found="NVML has not listed the node's devices yet",
            do="see `nvidia-smi` on the node; the kubelet retries",
        )
    uid = (found.get("metadata") or {}).get("uid")
    if uid != reference.uid:
        raise ResourceClaimUnusable(asked, found=f"its UID is now {uid}, not {reference.uid}")
    allocation = ((found.get("status") or {}).get("allocation") or {}).get("devices") or {}
    results = [each for each in allocation.get("results") or () if each.get("driver") == driver]
    if not results:
        raise ResourceClaimUnusable(asked, found=f"it has no allocation from {driver}")
    configurations = read_all(allocation.get("config") or (), driver, asked)
    allocated = []
    for each in results:
        device = _device(each, pool, devices, asked)
        allocated.append(AllocatedDevice(str(each.get("request")), device, devices[device.device]))
    annotations = (found.get("metadata") or {}).get("annotations") or {}
    pod_claim = str(annotations.get(_POD_CLAIM, ""))
    return Claim(
        reference.uid,
        reference.namespace,
        reference.name,
        configured(reference.uid, allocated, configurations, asked),
        # The creator of a claim controls its annotations, and this one becomes part of a path.
        pod_claim=pod_claim if _LABEL.fullmatch(pod_claim) else "",
    )


def allocated_devices(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of all devices that were allocated to a claim, also of other drivers."""
    allocation = ((document.get("status") or {}).get("allocation") or {}).get("devices") or {}
    for each in allocation.get("results") or ():
        yield str(each.get("device"))


def _device(
    result: Mapping[str, Any], pool: str, devices: Mapping[str, Device], asked: str
) -> ClaimDevice:
    name = str(result.get("device"))
    device = devices.get(name)
    if device is None or device.lost or result.get("pool") != pool:
        why = "it does not answer, or has no node" if device is not None else "the node lacks it"
        if result.get("pool") != pool:
            why = f"it is in the pool {result.get('pool')}, not in {pool}"
        raise ClaimedDeviceMissing(
            f"the device {name} of {asked}", found=why,
            do="see `nvshim list` on the node, and delete the pod",
        )  # fmt: skip
    share, memory, shares = consumed(result)
    if share and device.part is not None:
        raise ResourceClaimUnusable(
            f"a share of the device {name} for {asked}",
            found="it is created for one claim and cannot be shared",
        )
    # "gpu/any" is the subrequest "any": the kubelet knows the request.
    request, _, chosen = str(result.get("request")).partition("/")
    return ClaimDevice(
        request,
        pool,
        name,
        device.uuid,
        device.gpu,
        admin=result.get("adminAccess") is True,
        share=share,
        memory=memory,
        shares=shares,
        chosen=chosen,
    )


def refuse_unavailable(
    claim: Claim,
    claims: Collection[Claim],
    drained: Mapping[str, str],
    plugin_gave: Mapping[str, str],
    devices: Mapping[str, Device],
) -> None:
    """Check that a claim may have its devices.

    Args:
        claims: all claims of the node.
        drained: as for :func:`refuse_drained`.
        plugin_gave: who has a device of a device plugin, by the device's UUID.
        devices: of the node, by their names.

    Raises:
        DeviceDrained: a device is out of service.
        DeviceTaken: another claim or pod has a device, or too little of it is left.
        SharingConflict: another claim shares a device in another way.
    """
    held = [replace(each, devices=each.held) if each.previous else each for each in claims]
    refuse_drained(claim, drained)
    refuse_taken(claim, held, plugin_gave)
    refuse_overfull(claim, held, devices)
    refuse_conflicts(claim, held)


def refuse_drained(claim: Claim, drained: Mapping[str, str]) -> None:
    """Check that no device of a claim is out of service.

    Args:
        drained: since when and why devices, or the driver, are out of service
            (:func:`hooks.node.drained.reasons_by_device`).

    Raises:
        DeviceDrained: one of them is.
    """
    for device in claim.devices:
        names = (device.uuid, device.gpu, DRIVER)
        if why := next((drained[name] for name in names if name in drained), ""):
            raise DeviceDrained(
                f"the device {device.device} of {claim}",
                found=f"is out of service {why}",
                do="delete the pod; its controller recreates it with another device",
            )


def refuse_taken(
    claim: Claim, others: Iterable[Claim], plugin_gave: Mapping[str, str] | None = None
) -> None:
    """Check that no other claim or pod has a device of a claim, or a part of it.

    Args:
        plugin_gave: who has a device from a device plugin, by the device's UUID.

    Raises:
        DeviceTaken: another claim or pod has it.
    """
    taken = [
        (device.uuid, device.gpu, str(other), bool(device.share))
        for other in others
        if other.uid != claim.uid
        for device in other.devices
        if not device.admin
    ]
    taken += [(uuid, uuid, who, False) for uuid, who in (plugin_gave or {}).items()]
    for device in claim.devices:
        if device.admin:
            continue
        for uuid, gpu, who, is_share in taken:
            if is_share and device.share and uuid == device.uuid:
                continue
            if device.uuid in {uuid, gpu} or uuid == device.gpu:
                raise DeviceTaken(f"the device {device.device} of {claim}", found=f"{who} has it")


_NVIDIA: Final = "resource.nvidia.com/v1beta1"

_FROM_CLASS: Final = "FromClass"


class _Wrong(Exception):
    """A configuration is wrong; the message says why."""


def read_all(
    entries: Iterable[Mapping[str, Any]], driver: str, asked: str
) -> tuple[Configuration, ...]:
    """Return the configurations for this driver, those of the class first.

    Args:
        entries: the configurations in the claim's allocation.

    Raises:
        ClaimConfigUnknown: one of them is unknown or impossible.
    """
    found = []
    for each in sorted(entries, key=lambda each: each.get("source") != _FROM_CLASS):
        where = "its DeviceClass" if each.get("source") == _FROM_CLASS else "the claim"
        opaque = each.get("opaque")
        if not isinstance(opaque, dict):
            raise ClaimConfigUnknown(
                f"a configuration of {asked}", found="it is not a driver's (opaque)"
            )
        if opaque.get("driver") != driver:
            continue
        try:
            kind, devices, request = _read(opaque.get("parameters"))
        except _Wrong as error:
            raise ClaimConfigUnknown(
                f"a configuration of {asked}",
                found=str(error),
                do=f"change or remove it in {where}",
            ) from error
        requests = frozenset(map(str, each.get("requests") or ()))
        found.append(Configuration(kind, devices, requests, request))
    return tuple(found)


# -- reading configurations ----------------------------------------------------------------------


def _read(parameters: object) -> tuple[str, frozenset[str], SharingRequest]:
    tree = _object(parameters, "parameters")
    kind, version = str(tree.get("kind")), str(tree.get("apiVersion"))
    if kind == "VfioDeviceConfig":
        raise _Wrong("VfioDeviceConfig asks for GPU passthrough, which is not supported")
    reader = _READERS.get((version, kind))
    if reader is None:
        known = ", ".join(f"{name} of {of}" for of, name in _READERS)
        raise _Wrong(f"{kind} of {version} is unknown; use {known}")
    devices, read = reader
    rest = {key: value for key, value in tree.items() if key not in {"kind", "apiVersion"}}
    return kind, devices, read(rest, kind)


def _fields(value: object, at: str, known: Mapping[str, tuple[_Reader, Any]]) -> list[Any]:
    """Return the fields of an object; ``known`` has a reader and a default for each."""
    tree = _object(value, at)
    for key in tree:
        if key not in known:
            raise _Wrong(f"{at}.{key} is unknown; use {', '.join(known)}")
    return [
        default if tree.get(key) is None else read(tree[key], f"{at}.{key}")
        for key, (read, default) in known.items()
    ]


def _gpu_config(tree: object, at: str) -> SharingRequest:
    request: SharingRequest
    (request,) = _fields(tree, at, {"sharing": (_sharing, SharingRequest())})
    return request


def _mig_config(tree: object, at: str) -> SharingRequest:
    request = _gpu_config(tree, at)
    if request.sharing.time_slice:
        raise _Wrong(f"{at}.sharing.strategy is TimeSlicing, which a MIG device cannot have")
    return request


def _sharing(tree: object, at: str) -> Any:
    strategy = _object(tree, at).get("strategy")
    if strategy not in ("TimeSlicing", "MPS"):  # it may be a list
        raise _Wrong(f"{at}.strategy is {strategy!r}, not TimeSlicing or MPS")
    known: dict[str, tuple[_Reader, Any]] = {"strategy": (lambda *_: None, None)}
    if strategy == "MPS":
        mps = partial(_mps, words=_NVIDIAS)
        return _fields(
            tree, at, {**known, "mpsConfig": (mps, SharingRequest(Sharing(daemon=MPS)))}
        )[1]
    _, interval = _fields(tree, at, {**known, "timeSlicingConfig": (_slicing, INTERVALS[0])})
    return SharingRequest(Sharing(interval))


def _slicing(tree: object, at: str) -> str:
    (interval,) = _fields(tree, at, {"interval": (_interval, INTERVALS[0])})
    return str(interval)


def _device_sharing(tree: object, at: str) -> SharingRequest:
    mps_reader = partial(_mps, words=_WORDS)
    mps, interval = _fields(tree, at, {"mps": (mps_reader, None), "timeSlice": (_interval, "")})
    if mps and interval:
        raise _Wrong(f"{at} has both timeSlice and mps; use one of them")
    return mps or SharingRequest(Sharing(interval))


def _mps(tree: object, at: str, words: Sequence[str]) -> SharingRequest:
    readers: Sequence[tuple[_Reader, Any]]
    readers = ((_percent, ALL), (_mebibytes, 0), (_limits, {}), (_flag, False))
    found = dict(zip(words, readers, strict=True))
    threads, memory, memory_of, multi_user = _fields(tree, at, found)
    return SharingRequest(Sharing("", MPS, threads or ALL, memory, multi_user), memory_of)


def _percent(value: object, at: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= ALL:
        raise _Wrong(f"{at} is {value!r}, not a whole number from 0 to {ALL}")
    return value


def _flag(value: object, at: str) -> bool:
    if not isinstance(value, bool):
        raise _Wrong(f"{at} is {value!r}, not true or false")
    return value


def _interval(value: object, at: str) -> str:
    if value not in INTERVALS:
        raise _Wrong(f"{at} is {value!r}, not one of {', '.join(INTERVALS)}")
    return str(value)


def _mebibytes(value: object, at: str) -> int:
    size = parse_quantity(value)
    if size is None or size < MEBI:
        raise _Wrong(f"{at} is {value!r}, not a quantity of at least 1Mi, such as 10Gi")
    return size // MEBI


def _limits(value: object, at: str) -> dict[str, int]:
    return {key: _mebibytes(size, f"{at}.{key}") for key, size in _object(value, at).items()}


def _object(value: object, at: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(f"{at} is {value!r}, not an object")
    return value


_WORDS: Final = ("threadPercentage", "memoryLimit", "memoryLimitOf", "multiUser")
_NVIDIAS: Final = (
    "defaultActiveThreadPercentage", "defaultPinnedDeviceMemoryLimit",
    "defaultPerDevicePinnedMemoryLimit", "multiUser",
)  # fmt: skip
_READERS: Final[
    Mapping[tuple[str, str], tuple[frozenset[str], Callable[[object, str], SharingRequest]]]
] = {
    (_NVIDIA, "GpuConfig"): (frozenset({GPU}), _gpu_config),
    (_NVIDIA, "MigDeviceConfig"): (frozenset({MIG}), _mig_config),
    (OURS, "DeviceSharing"): (frozenset({GPU, MIG}), _device_sharing),
}
"""By version and kind of a configuration: the devices it is for, and its reader."""
