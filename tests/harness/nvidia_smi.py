"""The nvidia-smi of a simulated node."""

from __future__ import annotations

import os
import subprocess

from integration.simulated import SimulatedNode


def nvidia_smi(node: SimulatedNode, *arguments: str) -> str:
    """Run it as a user does; return its output."""
    root = node.driver_root
    return subprocess.run(
        [f"{root}/usr/bin/nvidia-smi", *arguments],
        env={"LD_LIBRARY_PATH": f"{root}/usr/lib/{os.uname().machine}-linux-gnu"},
        capture_output=True, text=True, check=False, timeout=60,
    ).stdout  # fmt: skip
