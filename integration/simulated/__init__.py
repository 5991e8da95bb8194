"""Simulate a node with GPUs in a directory, for machines without GPUs.

Developing and testing the shim should not need a GPU. A simulated node is::

    DIR/config.toml       the shim's configuration, which points to the directories below
    DIR/scenario.toml     the node's hardware, with all defaults written out
    DIR/driver/           the driver's files: Debian's packages in the layout of NVIDIA's installer
    DIR/dev/              device nodes: nvidia0, nvidiactl, nvidia-uvm, nvidia-caps/, dri/
    DIR/proc/             driver/nvidia, driver/nvidia-caps, devices
    DIR/sys/              bus/pci/devices, module/nvidia
    DIR/state/            the shim's state; nvml-faults, nvml-events, nvml-processes, nvml-facts
                          and nvml-nvlinks control what NVML reports (see nvml.c)

The engine takes these roots from its configuration, so it runs the same code as on a real node. The
driver's files, the device nodes and all formats are real, but opening a node fails. The NVML
library is ours; it reports the scenario.

    with SimulatedNode.create("/tmp/node", Scenario.load("two")) as node:
        print(node.config_path)

From a shell: ``nvshim simulate create /tmp/node --scenario mig``.
"""

from integration.simulated.node import SimulatedNode
from integration.simulated.scenario import Scenario

__all__ = ["Scenario", "SimulatedNode"]
