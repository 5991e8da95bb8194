"""A CDI spec as values: the content of one file, checked by :mod:`hooks.cdi.schema`.

Names of vendors, classes and devices:

==========  ==============================================  =====================
part        characters, starting with / ending with        longest
==========  ==============================================  =====================
vendor      A-Z a-z 0-9 _ - . ; letter / letter or digit    253
class       A-Z a-z 0-9 _ - . ; letter / letter or digit    63
device      A-Z a-z 0-9 _ - . : ; letter or digit / same    253
==========  ==============================================  =====================

Source: CDI specification 1.1.0, "CDI JSON Specification", "Kind" and "CDI Devices". It sets no
limit for a device's name; ours is that of a file name.
"""

from __future__ import annotations

import re
from typing import Final

from api.values import dataclass
from hooks.cdi.errors import CdiNameMalformed
from hooks.plan import IntelRdt, NetDevice

_LABEL: Final = re.compile(r"[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?", re.ASCII)
_PARTS: Final = {
    "vendor": (_LABEL, 253),
    "class": (_LABEL, 63),
    "device": (re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?", re.ASCII), 253),
}
"""The characters and length that a part of a name may have."""


@dataclass(frozen=True, slots=True)
class QualifiedName:
    """The full name of a device, ``vendor/class=device``."""

    vendor: str
    class_: str
    device: str

    @property
    def kind(self) -> str:
        """Vendor and class, as a spec file has them."""
        return f"{self.vendor}/{self.class_}"

    def __str__(self) -> str:
        return f"{self.kind}={self.device}"


def parse_name(text: str) -> QualifiedName:
    """Return the parts of a device's full name.

    Raises:
        CdiNameMalformed: it does not have the form of one.
    """
    kind, equals, device = text.partition("=")
    vendor, slash, class_ = kind.partition("/")
    if not (equals and slash):
        fault = "it is not of the form vendor/class=name"
    else:
        fault = (
            fault_of("vendor", vendor) or fault_of("class", class_) or fault_of("device", device)
        )
    if fault:
        raise CdiNameMalformed(
            f"the CDI device {text!r}", found=fault, do="write it as vendor.com/class=name"
        )
    return QualifiedName(vendor, class_, device)


def fault_of(part: str, name: str) -> str:
    """Return what is wrong with a part's name, by :data:`_PARTS`; "" if nothing."""
    pattern, longest = _PARTS[part]
    if not name:
        return f"the name of the {part} is empty"
    if len(name) > longest:
        return f"the name of the {part} is longer than {longest} characters"
    return "" if pattern.fullmatch(name) else f"{name!r} is no name of a {part}"


NO_PERMISSIONS: Final = "none"
"""``permissions`` of a device node that the device cgroup does not allow."""


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node; fields that are None or "" are looked up on the host."""

    path: str
    host_path: str = ""
    kind: str = ""
    major: int = 0
    minor: int = 0
    mode: int | None = None
    permissions: str = ""
    uid: int | None = None
    gid: int | None = None


@dataclass(frozen=True, slots=True)
class SpecMount:
    """A mount, with only what the file says."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ()
    kind: str = ""


@dataclass(frozen=True, slots=True)
class SpecHook:
    """An OCI hook; ``name`` is its list."""

    name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int | None = None


@dataclass(frozen=True, slots=True)
class Edits:
    """``containerEdits``, of one device or of all devices of a file."""

    env: tuple[str, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[SpecMount, ...] = ()
    hooks: tuple[SpecHook, ...] = ()
    additional_gids: tuple[int, ...] = ()
    intel_rdt: IntelRdt | None = None
    net_devices: tuple[NetDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class SpecDevice:
    """A device that a container may name."""

    name: str
    edits: Edits
    annotations: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class SpecFile:
    """The content of one file."""

    version: str  # of the CDI specification
    kind: str
    devices: tuple[SpecDevice, ...]
    edits: Edits = Edits()  # the edits for each of the devices
    annotations: tuple[tuple[str, str], ...] = ()  # for users and programs that read the file
