"""A simulated node that becomes another one."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from typing import Final

from integration.simulated.layouts import Layout
from integration.simulated.node import SimulatedNode, driver_of
from integration.simulated.scenario import Scenario

_MADE_INSTANCES: Final = "nvml-mig"
"""The file of the state directory with the MIG instances of now, once they are not the scenario's:
``nvidia-smi mig`` makes and undoes them (nvml.c)."""


def changed_node(
    node: SimulatedNode, scenario: Scenario, *, layout: Layout = Layout.INSTALLER
) -> SimulatedNode:
    """Make the node another, as an update of the driver or a change of its GPUs does.

    What stands for the driver, /dev, /proc and /sys is made anew in the same places; the shim's
    state stays, and files that containers have mounted go on in them.

    Returns:
        The node as it is now, in the place of the one before.
    """
    files, version = driver_of(scenario)
    for name in ("driver", "dev", "proc", "sys"):
        shutil.rmtree(os.path.join(node.directory, name))
    with suppress(FileNotFoundError):  # instances that were made on the node before
        os.unlink(os.path.join(node.state, _MADE_INSTANCES))
    changed = SimulatedNode(node.directory, scenario, version)
    changed.fill(files, layout)
    return changed
