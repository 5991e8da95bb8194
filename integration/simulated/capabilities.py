"""The numbers of MIG capabilities: minors of ``/dev/nvidia-caps/nvidia-capN``.

The kernel module uses fixed numbers, whatever instances exist: two for the machine, then for each
of 32 GPUs fifteen GPU instances with eight compute instances each. So the list in
``/proc/driver/nvidia-caps/mig-minors`` is the same on every node.

Source: NVIDIA's MIG user guide, "Device Nodes and Capabilities".
"""

from __future__ import annotations

import functools
from typing import Final

CONFIG_MINOR: Final = 1
MONITOR_MINOR: Final = 2

_FIRST: Final = 3
_GPUS: Final = 32
_INSTANCES: Final = 15
_COMPUTE: Final = 8


def access_minor(gpu: int, instance: int, compute: int | None = None) -> int:
    """Return the minor that gives access to an instance.

    Args:
        gpu: the minor of the GPU's node.
        instance: the number of the GPU instance.
        compute: the number of the compute instance within it; None for the GPU instance itself.

    Returns:
        The N of ``nvidia-capN``.
    """
    of_instance = _FIRST + (gpu * _INSTANCES + instance) * (1 + _COMPUTE)
    return of_instance if compute is None else of_instance + 1 + compute


@functools.cache
def mig_minors() -> str:
    """Return the content of ``/proc/driver/nvidia-caps/mig-minors``."""
    lines = [f"config {CONFIG_MINOR}", f"monitor {MONITOR_MINOR}"]
    for gpu in range(_GPUS):
        for instance in range(_INSTANCES):
            path = f"gpu{gpu}/gi{instance}"
            lines.append(f"{path}/access {access_minor(gpu, instance)}")
            lines += [
                f"{path}/ci{compute}/access {access_minor(gpu, instance, compute)}"
                for compute in range(_COMPUTE)
            ]
    return "\n".join(lines) + "\n"
