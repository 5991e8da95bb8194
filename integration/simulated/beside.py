"""What a simulated node has beside GPUs: the drivers that work with them, each with its nodes.

============  ====================================================================
key           what it brings
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

import os
from typing import TYPE_CHECKING, Final

from integration.simulated.devices import Node, free_majors, make_nodes
from integration.simulated.tree import write_tree

if TYPE_CHECKING:
    from collections.abc import Iterable

KEYS: Final = ("gds", "mofed", "gdrcopy", "nvswitch")

_MISC: Final = 10
_VERBS: Final = 231
_FIRST_VERBS: Final = 192
_RDMA_CM: Final = 58
_CONTROL_OF_SWITCHES: Final = 255

_CUFILE: Final = '{"logging": {"level": "ERROR"}, "properties": {"use_compat_mode": false}}\n'


def add_beside(directory: str, keys: Iterable[str]) -> None:
    """Add drivers to a node.

    Args:
        directory: the node's, with its ``dev``, ``proc/devices`` and ``driver``.
        keys: which, of :data:`KEYS`.
    """
    devices = os.path.join(directory, "proc/devices")
    with open(devices, encoding="ascii") as file:
        text = file.read()
    free = free_majors(text)
    nodes: list[Node] = []
    majors: list[tuple[int, str]] = []
    for key in keys:
        match key:
            case "gds":
                major = next(free)
                majors.append((major, "nvidia-fs"))
                nodes += [Node(f"nvidia-fs{number}", major, number) for number in range(16)]
                _write(directory, "driver", {"etc/cufile.json": _CUFILE, "run/udev/data/b8:0": ""})
            case "mofed":
                majors.append((_VERBS, "infiniband_verbs"))
                nodes += [Node(f"infiniband/uverbs{n}", _VERBS, _FIRST_VERBS + n) for n in range(2)]
                nodes.append(Node("infiniband/rdma_cm", _MISC, _RDMA_CM))
                _write(directory, "proc", {"misc": f" 63 vga_arbiter\n {_RDMA_CM} rdma_cm\n"})
            case "gdrcopy":
                major = next(free)
                majors.append((major, "gdrdrv"))
                nodes.append(Node("gdrdrv", major, 0))
            case "nvswitch":
                major = next(free)
                majors.append((major, "nvidia-nvswitch"))
                nodes.append(Node("nvidia-nvswitchctl", major, _CONTROL_OF_SWITCHES))
                nodes += [Node(f"nvidia-nvswitch{number}", major, number) for number in range(4)]
    make_nodes(os.path.join(directory, "dev"), nodes)
    os.unlink(devices)
    _write(directory, "proc", {"devices": _with_majors(text, majors)})


def _write(directory: str, below: str, files: dict[str, str]) -> None:
    write_tree(os.path.join(directory, below), files)


def _with_majors(text: str, majors: Iterable[tuple[int, str]]) -> str:
    character, _, block = text.partition("\n\n")
    title, *lines = character.splitlines()
    lines = sorted(
        {*lines, *(f"{major:3} {name}" for major, name in majors)},
        key=lambda line: int(line.split()[0]),
    )
    return "\n".join([title, *lines]) + f"\n\n{block}"
