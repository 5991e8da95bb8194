"""A simulated node that changes."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from typing import Final

from integration.simulated.layouts import Layout
from integration.simulated.node import SimulatedNode, driver_of
from integration.simulated.scenario import Scenario

_MADE_INSTANCES: Final = "nvml-mig"
"""The file in the state directory with the current MIG instances, once they differ from the
scenario's: ``nvidia-smi mig`` creates and destroys them (nvml.c)."""


def changed_node(
    node: SimulatedNode, scenario: Scenario, *, layout: Layout = Layout.INSTALLER
) -> SimulatedNode:
    """Change the node, as a driver update or a change of its GPUs does.

    The simulated driver, /dev, /proc and /sys are recreated at the same paths. The shim's state
    stays, and containers keep their mounted files.

    Returns:
        The changed node, which replaces the previous one.
    """
    files, version = driver_of(scenario)
    for name in ("driver", "dev", "proc", "sys"):
        shutil.rmtree(os.path.join(node.directory, name))
    with suppress(FileNotFoundError):  # instances that were created on the previous node
        os.unlink(os.path.join(node.state, _MADE_INSTANCES))
    changed = SimulatedNode(node.directory, scenario, version)
    changed.fill(files, layout)
    return changed
