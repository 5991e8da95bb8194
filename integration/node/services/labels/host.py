"""Read from sysfs what the labels need to know about the machine and its GPUs.

Source: PCI Local Bus Specification, configuration space and capabilities; NVIDIA's go-nvlib
pkg/vgpu, which recognises a vGPU by its vendor-specific capability.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from hooks.config import Config
from integration.files import read_some

_NVIDIA: Final = "0x10de"
_DISPLAY: Final = "0x03"

_LONGEST: Final = 4096
_SPACE: Final = 256  # bytes; an unprivileged reader gets 64
_FIRST: Final = 0x34  # the offset of the first capability
_VENDOR_SPECIFIC: Final = 9
_VGPU: Final = b"VF"
_MOST_CAPABILITIES: Final = 48


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The machine."""

    machine: str = ""  # its product name; "" if unknown
    # the PCI class of each of NVIDIA's display controllers ("0x030200"), by PCI address
    classes: Mapping[str, str] = field(default_factory=dict)
    vgpu: bool | None = None  # whether one of NVIDIA's devices is a vGPU; None if unknown


def look_at_host(config: Config, machine_file: str) -> HostFacts:
    """Read what the labels need.

    Args:
        config: locates sysfs.
        machine_file: the file with the machine's product name; "" for the one in sysfs.
    """
    machine = _text(machine_file or f"{config.sys}/class/dmi/id/product_name")
    bus = f"{config.sys}/bus/pci/devices"
    try:
        addresses = sorted(os.listdir(bus))
    except OSError:
        return HostFacts(machine)
    found = [each for each in addresses if _text(f"{bus}/{each}/vendor") == _NVIDIA]
    classes = {each: _text(f"{bus}/{each}/class") for each in found}
    vgpus = {_is_vgpu(f"{bus}/{each}/config") for each in found}
    return HostFacts(
        machine,
        {address: kind for address, kind in classes.items() if kind.startswith(_DISPLAY)},
        True if True in vgpus else None if None in vgpus else False,
    )


def _text(path: str) -> str:
    try:
        return read_some(path, _LONGEST).decode(errors="replace").strip()
    except OSError:
        return ""


def _is_vgpu(path: str) -> bool | None:
    """Return whether a PCI device is a vGPU; None if its configuration space is not readable."""
    try:
        space = read_some(path, _SPACE)
    except OSError:
        return None
    if len(space) < _SPACE:
        return None
    at = space[_FIRST]
    for _ in range(_MOST_CAPABILITIES):
        kind, after = space[at : at + 2] if 0 < at < _SPACE - 1 else (0, 0)
        if kind == _VENDOR_SPECIFIC and space[at + 3 : at + 5] == _VGPU:
            return True
        at = after
    return False
