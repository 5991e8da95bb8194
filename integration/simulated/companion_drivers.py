"""Drivers other than the GPUs' that a simulated node can have, each with its device nodes.

============  ====================================================================
key           device nodes and files
============  ====================================================================
``gds``       nvidia-fs: 16 nodes, as the module makes them, and /etc/cufile.json
              and /run/udev below the driver root
``mofed``     two InfiniBand adapters: uverbs0, uverbs1, and rdma_cm
``gdrcopy``   gdrdrv
``nvswitch``  four NVSwitches and their control node
============  ====================================================================

Source: the modules' sources (nvidia-fs, gdrcopy, nvidia-nvswitch; the kernel's
drivers/infiniband/core for uverbs and rdma_cm).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from integration.simulated.tree import MISC_MAJOR, Device, NodeTree

_VERBS: Final = 231
_FIRST_VERBS: Final = 192
_RDMA_CM: Final = 58
_CONTROL_OF_SWITCHES: Final = 255


def _add_gds(tree: NodeTree) -> None:
    major = tree.add_major("nvidia-fs")
    tree.devices += [Device(f"nvidia-fs{number}", major, number) for number in range(16)]
    tree.files["driver/etc/cufile.json"] = (
        '{"logging": {"level": "ERROR"}, "properties": {"use_compat_mode": false}}\n'
    )
    tree.files["driver/run/udev/data/b8:0"] = ""


def _add_mofed(tree: NodeTree) -> None:
    tree.add_major("infiniband_verbs", _VERBS)
    tree.devices += [Device(f"infiniband/uverbs{n}", _VERBS, _FIRST_VERBS + n) for n in range(2)]
    tree.devices.append(Device("infiniband/rdma_cm", MISC_MAJOR, _RDMA_CM))
    tree.files["proc/misc"] = f" 63 vga_arbiter\n {_RDMA_CM} rdma_cm\n"


def _add_gdrcopy(tree: NodeTree) -> None:
    tree.devices.append(Device("gdrdrv", tree.add_major("gdrdrv"), 0))


def _add_nvswitch(tree: NodeTree) -> None:
    major = tree.add_major("nvidia-nvswitch")
    tree.devices.append(Device("nvidia-nvswitchctl", major, _CONTROL_OF_SWITCHES))
    tree.devices += [Device(f"nvidia-nvswitch{number}", major, number) for number in range(4)]


COMPANION_DRIVERS: Final[Mapping[str, Callable[[NodeTree], None]]] = {
    "gds": _add_gds,
    "mofed": _add_mofed,
    "gdrcopy": _add_gdrcopy,
    "nvswitch": _add_nvswitch,
}
"""The function that adds each driver to a node, by the driver's key."""
