"""What a container asks for, read from its environment.

Rules for NVIDIA_VISIBLE_DEVICES (a comma list; spaces around an item and empty items do not
count). The first rule that holds decides:

====================================  ===================================================
unset in a legacy image               all GPUs. Legacy: CUDA_VERSION is set, and
                                      NVIDIA_REQUIRE_CUDA is not
unset, no item, or ``void`` anywhere  nothing is asked; the container is not touched at all
``none`` or ``all``, whichever first  ``none``: driver files and control nodes, no GPU;
                                      ``all``: every GPU and every MIG device
otherwise                             each item is one device:
``0``                                 a GPU by its index (PCI bus order)
``1:0``                               a MIG device by its index in the GPU with that index
``GPU-…``, ``MIG-…``                  a full UUID, in upper or lower case
====================================  ===================================================

Rules for NVIDIA_DRIVER_CAPABILITIES (a comma list): ``all`` anywhere is all of them; unset or
without an item it is ``utility,compute``, but all of them if unset in a legacy image; any
other word than the known ones is an error.

A variable that is set twice has its last value, as the process will see it. Parsing is total:
every string gives a request or one typed error.

Every container of the node passes through this module, and most ask for nothing. So it loads
no module that costs a millisecond (dataclasses, enum, re, typing): its values are written out
by hand. Further sources of requests (annotations, mounts) become functions beside
:func:`read_request` that return the same values.

Source: NVIDIA Container Toolkit, internal/config/image; its user guide, "Environment
variables". Where they differ from it: a UUID may be written in any case, and the
capabilities are honoured.
"""

from __future__ import annotations

from hooks.errors import MalformedDevice, MalformedSpec, UnknownCapability

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any, Final, TypeAlias

__all__ = [
    "CAPABILITIES",
    "DEFAULT_CAPABILITIES",
    "AllDevices",
    "Capability",
    "DeviceName",
    "Devices",
    "Feature",
    "GpuIndex",
    "GpuUuid",
    "MigIndex",
    "MigUuid",
    "NamedDevices",
    "NoDevices",
    "Origin",
    "Request",
    "Void",
    "parse_capabilities",
    "parse_devices",
    "read_request",
]


class Capability:
    """The words of NVIDIA_DRIVER_CAPABILITIES (an ``enum`` would cost its import)."""

    COMPUTE: Final = "compute"
    UTILITY: Final = "utility"
    GRAPHICS: Final = "graphics"
    VIDEO: Final = "video"
    DISPLAY: Final = "display"
    NGX: Final = "ngx"
    COMPAT32: Final = "compat32"


CAPABILITIES: Final = frozenset(
    {
        Capability.COMPUTE,
        Capability.UTILITY,
        Capability.GRAPHICS,
        Capability.VIDEO,
        Capability.DISPLAY,
        Capability.NGX,
        Capability.COMPAT32,
    }
)
DEFAULT_CAPABILITIES: Final = frozenset({Capability.UTILITY, Capability.COMPUTE})


class _Value:
    """An immutable value with slots: what a frozen dataclass gives, without its import."""

    __slots__: tuple[str, ...] = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    def __hash__(self) -> int:
        return hash((type(self), *(getattr(self, name) for name in self.__slots__)))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"{type(self).__name__}({fields})"


class GpuIndex(_Value):
    """A GPU by its index: its place in PCI bus order, from 0."""

    __slots__ = __match_args__ = ("index",)
    index: int

    def __init__(self, index: int) -> None:
        object.__setattr__(self, "index", index)

    def __str__(self) -> str:
        return str(self.index)


class GpuUuid(_Value):
    """A GPU by its UUID, written ``GPU-`` and lower-case hexadecimal."""

    __slots__ = __match_args__ = ("uuid",)
    uuid: str

    def __init__(self, uuid: str) -> None:
        object.__setattr__(self, "uuid", uuid)

    def __str__(self) -> str:
        return self.uuid


class MigIndex(_Value):
    """A MIG device by its index within the GPU with an index."""

    __slots__ = __match_args__ = ("gpu", "index")
    gpu: int
    index: int

    def __init__(self, gpu: int, index: int) -> None:
        object.__setattr__(self, "gpu", gpu)
        object.__setattr__(self, "index", index)

    def __str__(self) -> str:
        return f"{self.gpu}:{self.index}"


class MigUuid(_Value):
    """A MIG device by its UUID, written ``MIG-`` and lower-case hexadecimal."""

    __slots__ = __match_args__ = ("uuid",)
    uuid: str

    def __init__(self, uuid: str) -> None:
        object.__setattr__(self, "uuid", uuid)

    def __str__(self) -> str:
        return self.uuid


class Void(_Value):
    """None of the driver is asked."""

    __slots__ = ()


class NoDevices(_Value):
    """The driver's files and control nodes are asked, and no GPU (``none``)."""

    __slots__ = ()


class AllDevices(_Value):
    """Every full GPU and every MIG device of the node is asked (``all``)."""

    __slots__ = ()


class NamedDevices(_Value):
    """These devices are asked, in this order; no name twice, at least one."""

    __slots__ = __match_args__ = ("devices",)
    devices: tuple[DeviceName, ...]

    def __init__(self, devices: tuple[DeviceName, ...]) -> None:
        object.__setattr__(self, "devices", devices)


class Origin:
    """Who said what is asked: what policy goes by (an ``enum`` would cost its import)."""

    NOBODY: Final = "nobody"
    ENVIRONMENT: Final = "environment"  # the image's author may have
    MOUNTS: Final = "mounts"  # whoever wrote the pod's volumes: a device plugin
    ANNOTATIONS: Final = "annotations"  # the kubelet, or whoever may annotate a container
    DOCKER: Final = "docker"  # a person, by --gpus


class Feature:
    """What may be asked beside GPUs, by the words of the record."""

    GDS: Final = "gds"
    MOFED: Final = "mofed"
    GDRCOPY: Final = "gdrcopy"
    NVSWITCH: Final = "nvswitch"
    MIG_CONFIG: Final = "mig-config"
    MIG_MONITOR: Final = "mig-monitor"
    MANAGEMENT: Final = "management"  # every node of the driver


class Request(_Value):
    """What a container asks for, and who said so.

    Attributes:
        devices: of NVIDIA's devices, which.
        capabilities: the driver capabilities, a subset of :data:`CAPABILITIES`.
        features: what else of NVIDIA's, words of :class:`Feature`.
        imex_channels: numbers of IMEX channels; None for every one that the node has.
        requirements: expressions that the driver and each GPU have to meet
            ("cuda>=12.4 brand=tesla,driver>=535"), by the variable that has them.
        cdi_devices: fully qualified CDI names ("amd.com/gpu=0") that are not NVIDIA's.
        amd_devices: what AMD_VISIBLE_DEVICES asks; "" for nothing.
        intel_devices: what INTEL_VISIBLE_DEVICES asks; "" for nothing.
        origin: who said so, of :class:`Origin`.
        source: where it is said, for people ("NVIDIA_VISIBLE_DEVICES=0").
    """

    __slots__ = __match_args__ = (
        "devices",
        "capabilities",
        "features",
        "imex_channels",
        "requirements",
        "cdi_devices",
        "amd_devices",
        "intel_devices",
        "origin",
        "source",
    )
    devices: Devices
    capabilities: frozenset[str]
    features: frozenset[str]
    imex_channels: tuple[int, ...] | None
    requirements: tuple[tuple[str, str], ...]
    cdi_devices: tuple[str, ...]
    amd_devices: str
    intel_devices: str
    origin: str
    source: str

    def __init__(
        self,
        devices: Devices,
        capabilities: frozenset[str] = frozenset(),
        *,
        features: frozenset[str] = frozenset(),
        imex_channels: tuple[int, ...] | None = (),
        requirements: tuple[tuple[str, str], ...] = (),
        cdi_devices: tuple[str, ...] = (),
        amd_devices: str = "",
        intel_devices: str = "",
        origin: str = Origin.NOBODY,
        source: str = "",
    ) -> None:
        put = object.__setattr__
        put(self, "devices", devices)
        put(self, "capabilities", capabilities)
        put(self, "features", features)
        put(self, "imex_channels", imex_channels)
        put(self, "requirements", requirements)
        put(self, "cdi_devices", cdi_devices)
        put(self, "amd_devices", amd_devices)
        put(self, "intel_devices", intel_devices)
        put(self, "origin", origin)
        put(self, "source", source)

    @property
    def wants_driver(self) -> bool:
        """Whether anything of NVIDIA's driver is asked, so that its inventory is needed."""
        return not isinstance(self.devices, Void) or bool(self.features)

    @property
    def wants_injection(self) -> bool:
        """Whether anything is asked; if not, the container is not touched at all."""
        return self.wants_driver or bool(self.cdi_devices or self.amd_devices or self.intel_devices)


if TYPE_CHECKING:
    DeviceName: TypeAlias = GpuIndex | GpuUuid | MigIndex | MigUuid
    Devices: TypeAlias = Void | NoDevices | AllDevices | NamedDevices
else:  # names for importers; the unions themselves are for the type checker
    DeviceName = (GpuIndex, GpuUuid, MigIndex, MigUuid)
    Devices = (Void, NoDevices, AllDevices, NamedDevices)


_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
_CAPABILITIES: Final = "NVIDIA_DRIVER_CAPABILITIES"
_CUDA_VERSION: Final = "CUDA_VERSION"
_REQUIRE_CUDA: Final = "NVIDIA_REQUIRE_CUDA"
_VARIABLES: Final = frozenset({_DEVICES, _CAPABILITIES, _CUDA_VERSION, _REQUIRE_CUDA})


def read_request(spec: Mapping[str, Any]) -> Request:
    """What the container of an OCI spec asks for.

    Args:
        spec: config.json, decoded. It is not changed.

    Returns:
        The request; its ``devices`` are :class:`Void` if nothing is asked.

    Raises:
        MalformedSpec: the process or its environment has the wrong shape.
        MalformedDevice: an item of NVIDIA_VISIBLE_DEVICES has none of the known forms.
        UnknownCapability: a word of NVIDIA_DRIVER_CAPABILITIES is not known.

    Source: OCI runtime specification, config.md, "process".
    """
    variables = _variables(_environment(spec))
    legacy = bool(variables.get(_CUDA_VERSION)) and not variables.get(_REQUIRE_CUDA)
    value = variables.get(_DEVICES)
    if value is None:
        if not legacy:
            return Request(Void())
        devices: Devices = AllDevices()
        source = "legacy image: CUDA_VERSION is set"
    else:
        devices, source = parse_devices(value), f"{_DEVICES}={value}"
    if isinstance(devices, Void):
        return Request(devices, origin=Origin.ENVIRONMENT, source=source)
    capabilities = parse_capabilities(variables.get(_CAPABILITIES), legacy=legacy)
    return Request(devices, capabilities, origin=Origin.ENVIRONMENT, source=source)


def parse_devices(value: str) -> Devices:
    """A value of NVIDIA_VISIBLE_DEVICES, by the rules in this module's head.

    Args:
        value: the variable's value.

    Returns:
        What is selected.

    Raises:
        MalformedDevice: an item has none of the known forms.
    """
    items = _items(value)
    if not items or "void" in items:
        return Void()
    for item in items:
        if item == "none":
            return NoDevices()
        if item == "all":
            return AllDevices()
    return NamedDevices(tuple(dict.fromkeys(_device(item, value) for item in items)))


def parse_capabilities(value: str | None, *, legacy: bool = False) -> frozenset[str]:
    """A value of NVIDIA_DRIVER_CAPABILITIES, by the rules in this module's head.

    Args:
        value: the variable's value; None if it is not set.
        legacy: the image is one from before the variable existed.

    Returns:
        A subset of :data:`CAPABILITIES`, not empty.

    Raises:
        UnknownCapability: a word is not one of them.
    """
    if value is None and legacy:
        return CAPABILITIES
    items = _items(value or "")
    if "all" in items:
        return CAPABILITIES
    for item in items:
        if item not in CAPABILITIES:
            raise UnknownCapability(
                f"{_CAPABILITIES}={value}",
                found=f'"{item}" is no driver capability',
                do=f"use all, or some of {', '.join(sorted(CAPABILITIES))}",
            )
    return frozenset(items) or DEFAULT_CAPABILITIES


def _items(value: str) -> list[str]:
    return [item for item in (part.strip() for part in value.split(",")) if item]


# More digits than any node has devices; it bounds the work int() does.
_MOST_DIGITS = 6


def _device(item: str, value: str) -> DeviceName:
    head, colon, tail = item.partition(":")
    if _is_index(head) and not colon:
        return GpuIndex(int(head))
    if _is_index(head) and _is_index(tail):
        return MigIndex(int(head), int(tail))
    prefix, _, digits = item.partition("-")
    if _is_uuid(digits):
        kind = prefix.upper()
        if kind == "GPU":
            return GpuUuid(f"GPU-{digits.lower()}")
        if kind == "MIG":
            return MigUuid(f"MIG-{digits.lower()}")
    raise MalformedDevice(
        f"{_DEVICES}={value}",
        found=f'"{item}" names no device',
        do="use all, none, void, or a list of indices (0), MIG indices (0:1) and full UUIDs "
        "(GPU-…, MIG-…)",
    )


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


_UUID_GROUPS: Final = [8, 4, 4, 4, 12]
_HEX: Final = frozenset("0123456789abcdefABCDEF")


def _is_uuid(text: str) -> bool:
    groups = text.split("-")
    return [len(group) for group in groups] == _UUID_GROUPS and _HEX.issuperset("".join(groups))


def _environment(spec: Mapping[str, Any]) -> list[str]:
    process = spec.get("process") if isinstance(spec, dict) else None
    if not isinstance(process, dict):
        raise MalformedSpec(
            "the process of config.json",
            found="it is missing" if process is None else "it is no object",
            do="make the spec by the OCI runtime specification",
        )
    environment = process.get("env")
    if environment is None:  # optional in the specification
        return []
    if not isinstance(environment, list) or not all(isinstance(e, str) for e in environment):
        raise MalformedSpec(
            "process.env of config.json",
            found="it is no list of strings",
            do="make the spec by the OCI runtime specification",
        )
    return environment


def _variables(environment: Iterable[str]) -> dict[str, str]:
    found = {}
    for entry in environment:
        name, _, value = entry.partition("=")
        if name in _VARIABLES:
            found[name] = value
    return found
