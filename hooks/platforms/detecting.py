"""Detect the platform of a node, by the table of :mod:`hooks.platforms`.

Source: go-nvlib, pkg/nvlib/info (how NVIDIA's toolkit tells platforms apart).
"""

from __future__ import annotations

import os
from typing import Final

from hooks.config import Config, Platform
from hooks.node.fingerprint import read_names, read_text

DXCORE: Final = "/usr/lib/wsl/lib/libdxcore.so"
_TEGRA_RELEASE: Final = "/etc/nv_tegra_release"


def root_of(config: Config) -> str:
    """Return the directory that is "/" for the driver's files on a platform without a search."""
    return config.driver_root or config.host_root


def platform_of(config: Config) -> str:
    """Return the platform of this node, of :class:`hooks.config.Platform`; never AUTO."""
    if config.platform != Platform.AUTO:
        return config.platform
    root = root_of(config).rstrip("/")
    if os.path.exists(f"{config.dev}/dxg") and os.path.exists(f"{root}{DXCORE}"):
        return Platform.WSL
    return Platform.TEGRA if _is_tegra(config, root) else Platform.NVML


def _is_tegra(config: Config, root: str) -> bool:
    family = read_text(f"{config.sys}/devices/soc0/family") or ""
    if not (os.path.exists(f"{root}{_TEGRA_RELEASE}") or family.lower().startswith("tegra")):
        return False
    names = read_names(f"{root}{config.csv_directory}") or ()
    if not any(name.endswith(".csv") for name in names):
        return False
    gpus = read_names(f"{config.proc}/driver/nvidia/gpus") or ()
    return (
        not gpus
        or os.path.exists(f"{config.sys}/module/nvgpu")
        or any(is_integrated(bus_id) for bus_id in gpus)
    )


def is_integrated(bus_id: str) -> bool:
    """Whether a PCI address is that of the chip's own GPU, by the rule of NVIDIA's toolkit."""
    return bus_id.rpartition(".")[0] == "0000:01:00"
