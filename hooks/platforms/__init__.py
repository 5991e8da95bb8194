"""What NVIDIA's driver is like on this node, and what a container gets where it is unlike others.

==========  ==============================================  ==================================
platform    found by                                        what a container gets
==========  ==============================================  ==================================
``wsl``     /dev/dxg, and libdxcore.so of Windows' own       :mod:`hooks.platforms.wsl`
``tegra``   /etc/nv_tegra_release, or sysfs naming the       :mod:`hooks.platforms.tegra`
            chip's family; and files that list what it has
``nvml``    otherwise                                       :mod:`hooks.node.inventory`,
                                                            :mod:`hooks.edits.planning`
==========  ==============================================  ==================================

Rules
- ``platform`` in ``[node]`` of the configuration decides it; ``auto`` is the table, from above.
- A Tegra machine in which discrete GPUs alone are at work is ``nvml``. An integrated one is at
  work if its driver (nvgpu) is loaded, or if procfs lists one.
- The last one needs an inventory, which is costly and kept. The others are looked at each time:
  their files say it all.

Source: go-nvlib, pkg/nvlib/info (how NVIDIA's toolkit tells platforms apart).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from hooks.config import Platform
from hooks.node.witness import read_names, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from hooks.config import Config
    from hooks.edits.plan import Contribution
    from hooks.image.layout import Layout
    from hooks.requests.request import Request

__all__ = ["contribute", "is_integrated", "platform_of", "root_of"]

DXCORE: Final = "/usr/lib/wsl/lib/libdxcore.so"
_TEGRA_RELEASE: Final = "/etc/nv_tegra_release"


def root_of(config: Config) -> str:
    """The directory that is "/" for the driver's files on a platform that is not searched."""
    return config.driver_root or config.host_root


def platform_of(config: Config) -> str:
    """What this node is.

    Args:
        config: what was configured, and where to look.

    Returns:
        A word of :class:`hooks.config.Platform`, never AUTO.
    """
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
    """Whether a PCI address is that of a chip's own GPU: the one that NVIDIA's toolkit goes by."""
    return bus_id.rpartition(".")[0] == "0000:01:00"


def contribute(
    spec: Mapping[str, Any], request: Request, config: Config, layout: Layout
) -> Contribution:
    """What a container gets of NVIDIA's driver on a platform that has no inventory.

    Args:
        spec: config.json, decoded; its process was checked.
        request: what is asked.
        config: where to look.
        layout: what the image looks like.

    Returns:
        The plan and its bounds.

    Raises:
        RequestError: the node does not have what is asked.
        InventoryError: the platform's files are not fit for use.
    """
    if platform_of(config) == Platform.WSL:
        from hooks.platforms import wsl  # noqa: PLC0415 - one platform is enough for a node

        return wsl.contribute(request, config, layout)
    from hooks.platforms import tegra  # noqa: PLC0415 - likewise

    every = tegra.wants_every_file(spec["process"].get("env") or ())
    return tegra.contribute(request, config, layout, every_file=every)
