"""What a node has: a whole GPU, and one in MIG mode."""

from __future__ import annotations

from hooks.node.driver import Driver
from hooks.node.gpus import Gpu, MigDevice, Nodes
from hooks.node.inventory import Inventory
from hooks.words import Arch

__all__ = ["inventory"]


def inventory(*, mig: bool = True) -> Inventory:
    """The node's.

    Args:
        mig: whether the MIG devices are there.
    """
    parts = (MigDevice(1, 0, "MIG-a", 1, 0), MigDevice(1, 1, "MIG-b", 2, 0))
    return Inventory(
        driver=Driver("535.104.05", Arch.X86_64, (), (), ()),
        gpus=(
            Gpu(0, 0, "GPU-0", "0000:18:00.0", "H100"),
            Gpu(1, 1, "GPU-1", "0000:2a:00.0", "H100", mig=True),
        ),
        mig_devices=parts if mig else (),
        nodes=Nodes({}, {}, frozenset()),
        sockets={},
    )
