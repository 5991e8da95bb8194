"""A device node of a simulated GPU that a test can open. The others have no driver."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from integration.simulated import SimulatedNode


def make_openable(node: SimulatedNode, gpu: int) -> str:
    """Make a GPU's render node the kernel's ``/dev/full``, which nothing else has open.

    Args:
        gpu: its index.

    Returns:
        The path. A process that has it open holds the GPU.
    """
    path = f"{node.dev}/dri/renderD{128 + gpu}"
    os.unlink(path)
    os.mknod(path, 0o20666, os.makedev(1, 7))
    return path
