"""Platforms: how NVIDIA's driver is installed on this node, and its edits on Tegra and WSL2.

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
- ``platform`` in ``[node]`` of the configuration decides; with ``auto`` the table does, from the
  top.
- A Tegra machine in which only discrete GPUs are in use is ``nvml``. An integrated GPU is in use if
  its driver (nvgpu) is loaded, or if procfs lists one.
- The last platform needs an inventory, which is expensive and therefore cached. The others are read
  each time, because their files contain everything.

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
    """Return what a container gets of NVIDIA's driver on a platform that has no inventory.

    Args:
        spec: config.json, decoded; its process has been checked.

    Raises:
        RequestError: the node does not have what is requested.
        InventoryError: the platform's files cannot be used.
    """
    # Imported here, as in hooks.contributions: hardly any node needs them, and the first container
    # of a node would have to wait for them.
    from hooks.platforms import tegra, wsl  # noqa: PLC0415

    if platform_of(config) == Platform.WSL:
        return wsl.contribute(request, config, layout)
    every = tegra.wants_every_file(spec["process"].get("env") or ())
    return tegra.contribute(request, config, layout, every_file=every)
