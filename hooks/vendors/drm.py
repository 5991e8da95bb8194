"""Devices of the kernel's direct rendering manager, as sysfs lists them.

Rules
- ``class/drm/NAME`` is a link to ``…/DEVICE/drm/NAME``, so the link itself says whose node it
  is. Two nodes of one device belong together: ``cardN`` for display, ``renderDN`` for work.
- Connectors (``card0-DP-1``) are no nodes.
- The links in ``/dev/dri/by-path`` are udev's. A container gets those of its own nodes, by the
  names that they have on the host.

Source: Documentation/gpu/drm-uapi.rst, "Render nodes"; systemd's rules.d/60-drm.rules.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hooks.edits.plan import LinkDirectory
from hooks.node.witness import read_names, read_text

if TYPE_CHECKING:
    from collections.abc import Collection

    from hooks.config import Config

__all__ = ["DRM", "DrmDevice", "by_path_links", "drm_devices"]

DRM: Final = "drm"
"""The driver's name in /proc/devices."""

_BY_PATH: Final = "/dev/dri/by-path"
_NODES: Final = ("card", "renderD")


@dataclass(frozen=True, slots=True)
class DrmDevice:
    """A device with nodes below /dev/dri.

    Attributes:
        name: its name on its bus ("0000:03:00.0", "amdgpu_xcp_1").
        vendor: its PCI vendor, as sysfs writes it ("0x8086"); "" if it is on another bus.
        pci_class: its PCI class ("0x030000"); "" likewise.
        device_id: its PCI device id ("0x56a0"); "" likewise.
        driver: the name of the kernel driver that it is bound to; "" if it tells none.
        minors: the minor numbers of its nodes, by their names ("renderD128").
    """

    name: str
    vendor: str
    pci_class: str
    device_id: str
    driver: str
    minors: dict[str, int]

    @property
    def render_node(self) -> str | None:
        """The name of the node to work with; None if it is for display only."""
        return next((name for name in self.minors if name.startswith("renderD")), None)


def drm_devices(config: Config) -> tuple[DrmDevice, ...]:
    """The node's DRM devices.

    Args:
        config: where sysfs is.

    Returns:
        The devices in no order that means anything.
    """
    directory = f"{config.sys}/class/drm"
    nodes: dict[str, list[str]] = {}
    for name in read_names(directory) or ():
        if not any(name.removeprefix(kind).isdecimal() for kind in _NODES):
            continue
        try:
            target = os.readlink(f"{directory}/{name}")
        except OSError:
            continue
        nodes.setdefault(os.path.basename(os.path.dirname(os.path.dirname(target))), []).append(
            name
        )
    return tuple(_device(directory, device, names) for device, names in nodes.items())


def _device(directory: str, name: str, nodes: list[str]) -> DrmDevice:
    device = f"{directory}/{nodes[0]}/device"
    minors = {node: _minor(f"{directory}/{node}/dev") for node in nodes}
    try:
        driver = os.path.basename(os.readlink(f"{device}/driver"))
    except OSError:
        driver = ""
    return DrmDevice(
        name=name,
        vendor=_line(f"{device}/vendor"),
        pci_class=_line(f"{device}/class"),
        device_id=_line(f"{device}/device"),
        driver=driver,
        minors={node: minor for node, minor in minors.items() if minor is not None},
    )


def _line(path: str) -> str:
    return (read_text(path) or "").strip()


def _minor(path: str) -> int | None:
    minor = _line(path).partition(":")[2]
    return int(minor) if minor.isdecimal() else None


def by_path_links(config: Config, nodes: Collection[str], reason: str) -> tuple[LinkDirectory, ...]:
    """The links in /dev/dri/by-path that lead to some nodes.

    Args:
        config: where the device nodes are.
        nodes: names below /dev/dri.
        reason: whose they are, for people.

    Returns:
        One directory of links; none if the host has no links to these nodes.
    """
    directory = config.dev + _BY_PATH.removeprefix("/dev")
    links = []
    for name in read_names(directory) or ():
        try:
            target = os.path.basename(os.readlink(f"{directory}/{name}"))
        except OSError:
            continue
        if target in nodes:
            links.append((name, f"../{target}"))
    return (LinkDirectory(_BY_PATH, tuple(links), reason),) if links else ()
