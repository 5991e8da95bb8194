"""The words that all rooms of the engine share: architectures, capabilities, device names.

They are values and closed lists of strings. This module imports nothing of ours, so any room may
use it. The strings appear in records and configuration files and do not change.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final, TypeAlias

from api.values import dataclass, field

NVIDIA: Final = "NVIDIA"
"""The vendor whose devices have a grant of their own in the record."""


class Arch(Enum):
    """An architecture that driver libraries come in, by its ELF name."""

    X86_64 = "x86_64"
    I386 = "i386"
    AARCH64 = "aarch64"
    ARM = "arm"


class Capability:
    """The words of NVIDIA_DRIVER_CAPABILITIES."""

    COMPUTE: Final = "compute"
    UTILITY: Final = "utility"
    GRAPHICS: Final = "graphics"
    VIDEO: Final = "video"
    DISPLAY: Final = "display"
    NGX: Final = "ngx"
    COMPAT32: Final = "compat32"


CAPABILITIES: Final = frozenset(
    {"compute", "utility", "graphics", "video", "display", "ngx", "compat32"}
)
DEFAULT_CAPABILITIES: Final = frozenset({Capability.UTILITY, Capability.COMPUTE})


class Feature:
    """What a container may request besides GPUs, as the record writes it."""

    GDS: Final = "gds"
    MOFED: Final = "mofed"
    GDRCOPY: Final = "gdrcopy"
    NVSWITCH: Final = "nvswitch"
    MIG_CONFIG: Final = "mig-config"
    MIG_MONITOR: Final = "mig-monitor"
    MANAGEMENT: Final = "management"  # every node of the driver


IMEX: Final = "imex-channels"
"""The word for IMEX channels, which :class:`Feature` does not list."""


class Origin:
    """Where a request was written. Policy trusts some places more than others."""

    NOBODY: Final = "nobody"
    ENVIRONMENT: Final = "environment"  # may come from the image
    MOUNTS: Final = "mounts"  # a pod's volumes, from a device plugin
    ANNOTATIONS: Final = "annotations"  # by the kubelet, or by anyone who may annotate
    DOCKER: Final = "docker"  # by a user, with --gpus
    SPEC: Final = "spec"  # devices that the container engine has added itself, by CDI


CDI_KIND: Final = re.compile(
    r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?"
)
"""Vendor and class of a CDI name, as containers and configurations write it."""
CDI_DEVICE: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
"""The name of a device within its CDI kind."""


# -- names of devices, whose syntax hooks.requests.naming defines --------------------------


@dataclass(frozen=True, slots=True)
class GpuIndex:
    """A GPU by its index: its place in PCI bus order, from 0."""

    index: int

    def __str__(self) -> str:
        return str(self.index)


@dataclass(frozen=True, slots=True)
class GpuUuid:
    """A GPU by its UUID or a prefix of it: ``GPU-`` and lower-case hexadecimal."""

    uuid: str

    def __str__(self) -> str:
        return self.uuid


@dataclass(frozen=True, slots=True)
class GpuBusId:
    """A GPU by its PCI address, written as sysfs does: ``0000:07:00.0``."""

    bus_id: str

    def __str__(self) -> str:
        return self.bus_id


@dataclass(frozen=True, slots=True)
class MigIndex:
    """A MIG device by its index within the GPU with an index."""

    gpu: int
    index: int

    def __str__(self) -> str:
        return f"{self.gpu}:{self.index}"


@dataclass(frozen=True, slots=True)
class MigUuid:
    """A MIG device by its UUID or a prefix of it: ``MIG-`` and lower-case hexadecimal."""

    uuid: str

    def __str__(self) -> str:
        return self.uuid


@dataclass(frozen=True, slots=True)
class MigInstance:
    """A MIG device as drivers before 470 name it: by its GPU's UUID and its two instances."""

    gpu: str
    gpu_instance: int
    compute_instance: int

    def __str__(self) -> str:
        return f"MIG-{self.gpu}/{self.gpu_instance}/{self.compute_instance}"


DeviceName: TypeAlias = GpuIndex | GpuUuid | GpuBusId | MigIndex | MigUuid | MigInstance


@dataclass(frozen=True, slots=True)
class Void:
    """Nothing of the driver is requested."""


@dataclass(frozen=True, slots=True)
class NoDevices:
    """The driver's files and control nodes are requested, but no GPU (``none``)."""


@dataclass(frozen=True, slots=True)
class AllDevices:
    """Every full GPU and every MIG device of the node is requested (``all``)."""


@dataclass(frozen=True, slots=True)
class NamedDevices:
    """These devices are requested, in this order; no name twice, at least one."""

    devices: tuple[DeviceName, ...]


Devices: TypeAlias = Void | NoDevices | AllDevices | NamedDevices


@dataclass(frozen=True, slots=True)
class Names:
    """The meaning of a list of names."""

    devices: Devices
    features: frozenset[str] = frozenset()  # other NVIDIA features, words of Feature
    # IMEX channel numbers; None for every channel of the node
    imex_channels: tuple[int, ...] | None = ()
    cdi_devices: tuple[str, ...] = ()  # fully qualified names that only a CDI file can resolve

    @property
    def of_nvidia(self) -> bool:
        """Whether it names an NVIDIA device or feature that needs no CDI file."""
        named = not isinstance(self.devices, Void)
        return named or bool(self.features) or self.imex_channels != ()


@dataclass(frozen=True, slots=True)
class Node:
    """A device node of the host."""

    path: str  # in the container ("/dev/nvidia0")
    major: int
    minor: int
    mode: int
    uid: int
    gid: int
    host: str = field(default="", compare=False)


_MOST_LINKS: Final = 8


SERVICES: Final = ("persistenced", "fabricmanager", "mps")
"""The driver's services whose sockets or pipes a container may get."""

# In ASCII, and as word processors change them.
_QUOTES: Final = frozenset("\"'`\u201c\u201d\u2018\u2019")


def quotes_in(value: str) -> str:
    """Return a hint for the error about an unknown value if it contains quotes; else "".

    Docker's --env-file, lists in Compose files and doubly quoted YAML values keep quotes.
    """
    return "" if _QUOTES.isdisjoint(value) else "; write it without quotes: they are a part of it"


def items_of(value: str) -> list[str]:
    """Split a comma-separated list; drop spaces around items, and empty items."""
    return [item for item in (part.strip() for part in value.split(",")) if item]


def end_of(path: str, links: Mapping[str, str]) -> str:
    """Follow links to siblings or absolute paths; return "" if they form a loop."""
    for _ in range(_MOST_LINKS):
        if path not in links:
            return path
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), links[path]))
    return ""


def is_below(path: str, roots: Iterable[str]) -> bool:
    """Whether a path is one of these directories, or below one."""
    return any(path == root or path.startswith(f"{root.rstrip('/')}/") for root in roots)


KERNELS: Final = ("/proc", "/sys")
"""The directories below which the engine edits nothing."""


def normal_path(path: str) -> str:
    """Return an absolute path without ``.``, ``..`` and double slashes."""
    # normpath keeps two leading slashes, which POSIX lets mean something else
    return "/" + posixpath.normpath(path).lstrip("/")
