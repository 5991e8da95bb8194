"""Platforms: ways to install NVIDIA's driver on a node, and its edits on Tegra and WSL2.

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
- ``platform`` in ``[node]`` of the configuration decides; with ``auto``, the first match in the
  table.
- A Tegra machine in which only discrete GPUs are in use is ``nvml``. An integrated GPU is in use if
  its driver (nvgpu) is loaded, or if procfs lists one.
- ``nvml`` needs an inventory, which is expensive and therefore cached. The other platforms' files
  contain everything, and are read each time.

Source: go-nvlib, pkg/nvlib/info (how NVIDIA's toolkit tells platforms apart).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hooks.config import Config, Platform
from hooks.image.layout import Layout
from hooks.plan import Contribution
from hooks.platforms.detecting import platform_of, root_of
from hooks.requests.request import Request

__all__ = ["contribute", "platform_of", "root_of"]


def contribute(
    spec: Mapping[str, Any], request: Request, config: Config, layout: Layout
) -> Contribution:
    """Return the edits for NVIDIA's driver on a platform without an inventory.

    Args:
        spec: config.json, decoded; its process has been checked.

    Raises:
        RequestError: the node does not have what is requested.
        InventoryError: the platform's files are unusable.
    """
    # Imported here, as in hooks.contributions: few nodes need them, and a node's first container
    # would wait for them.
    from hooks.platforms import tegra, wsl  # noqa: PLC0415

    if platform_of(config) == Platform.WSL:
        return wsl.contribute(request, config, layout)
    every = tegra.wants_every_file(spec["process"].get("env") or ())
    return tegra.contribute(request, config, layout, every_file=every)
