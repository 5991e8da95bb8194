"""Detect whether a node has an NVIDIA GPU, before anything is installed on it.

No node label is present in every cluster: ``nvidia.com/gpu.present`` comes from the GPU operator,
the ``pci-…`` labels come from node feature discovery. The DaemonSets therefore run on every node
and do nothing on nodes without a GPU.

Rules
- A GPU is an NVIDIA display controller on the PCI bus, whatever driver it is bound to.
- Without a PCI device, these count too: ``/dev/dxg`` (WSL2), the files of a Jetson, and a loaded
  driver.

Source: PCI class codes; go-nvlib pkg/nvlib/info for the files of Tegra and WSL2.
"""

from __future__ import annotations

import os
from typing import Final

from integration.kubernetes.errors import HostUnusable
from integration.kubernetes.host import Host

_PCI: Final = "/sys/bus/pci/devices"
_VENDOR: Final = b"0x10de"
_DISPLAY: Final = b"0x03"
_SIGNS: Final = ("/dev/dxg", "/etc/nv_tegra_release", "/proc/driver/nvidia/version")
_FAMILY: Final = "/sys/devices/soc0/family"
_TEGRA: Final = b"tegra"


def has_gpu(host: Host) -> bool:
    """Return whether the node has an NVIDIA GPU."""
    return (
        any(_is_gpu(host, device) for device in host.files(_PCI)[1:])
        or any(host.identity(path) is not None for path in _SIGNS)
        or _read(host, _FAMILY).lower().startswith(_TEGRA)
    )


def _is_gpu(host: Host, device: str) -> bool:
    vendor = _read(host, os.path.join(device, "vendor"))
    return vendor == _VENDOR and _read(host, os.path.join(device, "class")).startswith(_DISPLAY)


def _read(host: Host, path: str) -> bytes:
    try:
        return (host.read(path) or b"").strip()
    except HostUnusable:  # unplugged meanwhile
        return b""
