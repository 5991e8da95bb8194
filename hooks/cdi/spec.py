"""A CDI spec as values: what one file says, checked by :mod:`hooks.cdi.schema`.

Source: CDI specification 1.1.0, "CDI JSON Specification".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from api.values import value

if TYPE_CHECKING:
    from hooks.edits.plan import IntelRdt, NetDevice

__all__ = [
    "NO_PERMISSIONS",
    "DeviceNode",
    "Edits",
    "SpecDevice",
    "SpecFile",
    "SpecHook",
    "SpecMount",
]

NO_PERMISSIONS: Final = "none"
"""``permissions`` of a device node that the device cgroup is not to allow."""


@value
class DeviceNode:
    """A device node; what is None or "" is to be looked up on the host."""

    path: str
    host_path: str = ""
    kind: str = ""
    major: int = 0
    minor: int = 0
    mode: int | None = None
    permissions: str = ""
    uid: int | None = None
    gid: int | None = None


@value
class SpecMount:
    """A mount, with what the file says and no more."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ()
    kind: str = ""


@value
class SpecHook:
    """An OCI hook; ``name`` is the list that it is of."""

    name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int | None = None


@value
class Edits:
    """``containerEdits``, of one device or of all devices of a file."""

    env: tuple[str, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[SpecMount, ...] = ()
    hooks: tuple[SpecHook, ...] = ()
    additional_gids: tuple[int, ...] = ()
    intel_rdt: IntelRdt | None = None
    net_devices: tuple[NetDevice, ...] = ()


@value
class SpecDevice:
    """A device that a container may name."""

    name: str
    edits: Edits
    annotations: tuple[tuple[str, str], ...] = ()


@value
class SpecFile:
    """All of one file.

    Attributes:
        version: of the CDI specification that it keeps to.
        kind: vendor and class.
        devices: at least one, no name twice.
        edits: what comes with any of the devices.
        annotations: for people and programs that look at the file.
    """

    version: str
    kind: str
    devices: tuple[SpecDevice, ...]
    edits: Edits = Edits()
    annotations: tuple[tuple[str, str], ...] = ()
