"""What a claim or its DeviceClass asks of devices by opaque configuration. Pure.

============================================  =============  ====================================
apiVersion                                    kind           for
============================================  =============  ====================================
resource.nvidia.com/v1beta1                   GpuConfig      whole GPUs, as NVIDIA's driver has it
resource.nvidia.com/v1beta1                   MigDevice-     MIG devices, likewise
                                              Config
gpu.containerd-shim-nvidia/v1beta1            DeviceSharing  either; the same in fewer words
============================================  =============  ====================================

Rules
- A configuration of another driver is none of ours. One that is not of a driver is an error.
- All that is ours is read strictly, also what is not used: a key that is not known is an error, for
  it would be a setting that is lost.
- For a device, of the configurations that name its request the last one counts; what a claim says
  comes after what its class says. One that names no requests is for all devices of its kind.
- A configuration that names a request for devices of another kind is an error.
- 0 percent of the threads stands for the daemon's default, which is all: it takes no 0 itself.
- GPUs are not given away to virtual machines, so VfioDeviceConfig is refused.

Source: kubernetes-sigs/dra-driver-nvidia-gpu, api/nvidia.com/resource/v1beta1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from integration.node.dra.quantities import MEBI, parse_quantity
from integration.node.errors import ClaimConfigUnknown
from integration.node.options import DRA_DRIVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = [
    "ALL",
    "GPU",
    "INTERVALS",
    "MIG",
    "OURS",
    "Configuration",
    "Mps",
    "Wish",
    "chosen",
    "read_all",
]

GPU: Final = "gpu"
MIG: Final = "mig"
"""The kinds of devices, as their attribute ``type`` has them."""

OURS: Final = f"{DRA_DRIVER}/v1beta1"
_NVIDIA: Final = "resource.nvidia.com/v1beta1"

INTERVALS: Final = ("Default", "Short", "Medium", "Long")
"""Time slices, by the driver's numbers."""

ALL: Final = 100
"""Percent."""
_FROM_CLASS: Final = "FromClass"


@dataclass(frozen=True, slots=True)
class Mps:
    """What is asked of MPS."""

    threads: int = ALL  # percent of the threads that a client may have
    memory: int = 0  # MiB that a client may have of each device; 0 for no limit
    # likewise, of one device, by its UUID or its place among those of the claim
    memory_of: Mapping[str, int] = field(default_factory=dict)
    multi_user: bool = False  # whether clients of several users may work at the same time


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of devices."""

    time_slice: str = ""  # of INTERVALS; "" for nothing
    mps: Mps | None = None  # None for nothing


@dataclass(frozen=True, slots=True)
class Configuration:
    """One entry that is ours."""

    kind: str  # "GpuConfig"
    devices: frozenset[str]  # the kinds of devices that it is for
    requests: frozenset[str]  # those that it is for; none for all
    wish: Wish


class _Wrong(Exception):
    """What is wrong with a configuration, in words."""


def read_all(
    entries: Iterable[Mapping[str, Any]], driver: str, asked: str
) -> tuple[Configuration, ...]:
    """The configurations that are ours, those of the class first.

    Args:
        entries: of the claim's allocation.
        driver: our name.
        asked: the claim, for messages.

    Raises:
        ClaimConfigUnknown: one of them means nothing to us, or cannot be.
    """
    found = []
    for each in sorted(entries, key=lambda each: each.get("source") != _FROM_CLASS):
        where = "its DeviceClass" if each.get("source") == _FROM_CLASS else "the claim"
        opaque = each.get("opaque")
        if not isinstance(opaque, dict):
            raise ClaimConfigUnknown(
                f"a configuration of {asked}", found="it is none of a driver's (opaque)"
            )
        if opaque.get("driver") != driver:
            continue
        try:
            kind, devices, wish = _read(opaque.get("parameters"))
        except _Wrong as error:
            raise ClaimConfigUnknown(
                f"a configuration of {asked}",
                found=str(error),
                do=f"change or remove it in {where}",
            ) from error
        requests = frozenset(map(str, each.get("requests") or ()))
        found.append(Configuration(kind, devices, requests, wish))
    return tuple(found)


def chosen(
    configurations: Sequence[Configuration], request: str, kind: str, asked: str
) -> int | None:
    """Which configuration counts for a device: its place among all; None for none of them.

    Args:
        request: of the device, with its subrequest ("gpu/any").
        kind: of the device: :data:`GPU` or :data:`MIG`.
        asked: the claim, for messages.

    Raises:
        ClaimConfigUnknown: it is for devices of another kind.
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


# -- how they are read ---------------------------------------------------------------------------


def _read(parameters: object) -> tuple[str, frozenset[str], Wish]:
    tree = _object(parameters, "parameters")
    kind, version = str(tree.get("kind")), str(tree.get("apiVersion"))
    if kind == "VfioDeviceConfig":
        raise _Wrong("VfioDeviceConfig asks for a GPU to be passed through, which is not done here")
    reader = _READERS.get((version, kind))
    if reader is None:
        known = ", ".join(f"{name} of {of}" for of, name in _READERS)
        raise _Wrong(f"{kind} of {version} is not known; known are {known}")
    devices, read = reader
    rest = {key: value for key, value in tree.items() if key not in {"kind", "apiVersion"}}
    return kind, devices, read(rest, kind)


def _gpu_config(tree: Mapping[str, Any], at: str) -> Wish:
    sharing = _part(tree, at, "sharing", ("sharing",))
    at = f"{at}.sharing"
    if sharing is None:
        return Wish()
    strategy = sharing.get("strategy")
    keys = {"TimeSlicing": "timeSlicingConfig", "MPS": "mpsConfig"}
    if strategy not in keys:
        raise _Wrong(f"{at}.strategy is {strategy!r}, and not TimeSlicing or MPS")
    part = _part(sharing, at, keys[strategy], ("strategy", keys[strategy])) or {}
    at = f"{at}.{keys[strategy]}"
    if strategy == "TimeSlicing":
        return Wish(time_slice=_interval(part, at, "interval", ("interval",)))
    words = (
        "defaultActiveThreadPercentage", "defaultPinnedDeviceMemoryLimit",
        "defaultPerDevicePinnedMemoryLimit", "multiUser",
    )  # fmt: skip
    return Wish(mps=_mps(part, at, words))


def _mig_config(tree: Mapping[str, Any], at: str) -> Wish:
    wish = _gpu_config(tree, at)
    if wish.time_slice:
        raise _Wrong(f"{at}.sharing.strategy is TimeSlicing, which a MIG device cannot have")
    return wish


def _device_sharing(tree: Mapping[str, Any], at: str) -> Wish:
    mps = _part(tree, at, "mps", ("mps", "timeSlice"))
    interval = _interval(tree, at, "timeSlice", ("mps", "timeSlice")) if "timeSlice" in tree else ""
    if mps is not None and interval:
        raise _Wrong(f"{at} has timeSlice and mps, of which one excludes the other")
    words = ("threadPercentage", "memoryLimit", "memoryLimitOf", "multiUser")
    return Wish(interval, None if mps is None else _mps(mps, f"{at}.mps", words))


def _mps(tree: Mapping[str, Any], at: str, words: Sequence[str]) -> Mps:
    _know(tree, at, words)
    threads, memory, memory_of, multi_user = words
    percent = tree.get(threads)
    if percent is None:
        percent = ALL
    if not isinstance(percent, int) or isinstance(percent, bool) or not 0 <= percent <= ALL:
        raise _Wrong(f"{at}.{threads} is {percent!r}, and not a whole number from 0 to {ALL}")
    many = tree.get(multi_user)
    if many is None:
        many = False
    if not isinstance(many, bool):
        raise _Wrong(f"{at}.{multi_user} is {many!r}, and not true or false")
    limit = tree.get(memory)
    limits = _part(tree, at, memory_of, words) or {}
    return Mps(
        percent or ALL,
        0 if limit is None else _mebibytes(limit, f"{at}.{memory}"),
        {key: _mebibytes(value, f"{at}.{memory_of}.{key}") for key, value in limits.items()},
        many,
    )


def _interval(tree: Mapping[str, Any], at: str, key: str, known: Sequence[str]) -> str:
    _know(tree, at, known)
    interval = tree.get(key)
    if interval is None:
        interval = INTERVALS[0]
    if interval not in INTERVALS:
        raise _Wrong(f"{at}.{key} is {interval!r}, and not one of {', '.join(INTERVALS)}")
    return str(interval)


def _mebibytes(value: object, at: str) -> int:
    size = parse_quantity(value)
    if size is None or size < MEBI:
        raise _Wrong(f"{at} is {value!r}, and not a quantity of at least 1Mi, such as 10Gi")
    return size // MEBI


def _part(
    tree: Mapping[str, Any], at: str, key: str, known: Sequence[str]
) -> Mapping[str, Any] | None:
    _know(tree, at, known)
    value = tree.get(key)
    return None if value is None else _object(value, f"{at}.{key}")


def _know(tree: Mapping[str, Any], at: str, known: Sequence[str]) -> None:
    for key in tree:
        if key not in known:
            raise _Wrong(f"{at}.{key} is not known; known are {', '.join(known)}")


def _object(value: object, at: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(f"{at} is {value!r}, and not an object")
    return value


_READERS: Final[
    Mapping[tuple[str, str], tuple[frozenset[str], Callable[[Mapping[str, Any], str], Wish]]]
] = {
    (_NVIDIA, "GpuConfig"): (frozenset({GPU}), _gpu_config),
    (_NVIDIA, "MigDeviceConfig"): (frozenset({MIG}), _mig_config),
    (OURS, "DeviceSharing"): (frozenset({GPU, MIG}), _device_sharing),
}
"""Who reads a configuration, and for which devices it is, by its version and kind."""
