"""Inventories of nodes for tests of the agent."""

from __future__ import annotations

from typing import Any, Final

from hooks.node.driver import Driver
from hooks.node.gpus import Gpu, MigDevice, Nodes
from hooks.node.inventory import Inventory
from hooks.words import Arch

DRIVER: Final = Driver("535.104.05", Arch.X86_64, (), (), ())


def node_with(
    *gpus: Gpu, mig: tuple[MigDevice, ...] = (), driver: Driver = DRIVER, **more: Any
) -> Inventory:
    """Make the inventory of a node with these GPUs, by default without device nodes."""
    nodes = more.pop("nodes", Nodes({}, {}, frozenset()))
    return Inventory(driver, gpus, mig, nodes, {}, **more)


def inventory(*, mig: bool = True) -> Inventory:
    """Make the inventory of a node with a whole GPU, and one in MIG mode.

    Args:
        mig: whether the MIG devices exist.
    """
    parts = (MigDevice(1, 0, "MIG-a", 1, 0), MigDevice(1, 1, "MIG-b", 2, 0))
    return node_with(
        Gpu(0, 0, "GPU-0", "0000:18:00.0", "H100"),
        Gpu(1, 1, "GPU-1", "0000:2a:00.0", "H100", mig=True),
        mig=parts if mig else (),
    )
