"""A directory that looks like a node with GPUs, for a machine that has none.

GPUs are rare; developing, testing and trying the shim must not need one. A simulated node is::

    DIR/config.toml       the shim's configuration for it: where its roots are
    DIR/scenario.toml     what it has, with nothing left to defaults
    DIR/driver/           the driver's files: Debian's packages in the layout of NVIDIA's installer
    DIR/dev/              device nodes: nvidia0, nvidiactl, nvidia-uvm, nvidia-caps/, dri/
    DIR/proc/             driver/nvidia, driver/nvidia-caps, devices
    DIR/sys/              bus/pci/devices, module/nvidia
    DIR/state/            the shim's state; nvml-faults, nvml-events, nvml-processes, nvml-facts
                          and nvml-nvlinks, by which NVML's GPUs come to life (see nvml.c)

The engine takes these roots from its configuration, so it runs the same code as on a real node.
Real is: the driver's files, the device nodes (nobody answers when they are opened), the formats.
Made up is: what stands behind them. The NVML library is ours; it reports what the scenario says.

    with SimulatedNode.create("/tmp/node", Scenario.load("two")) as node:
        print(node.config_path)

From a shell: ``nvshim simulate create /tmp/node --scenario mig``.
"""

from integration.simulated.node import SimulatedNode
from integration.simulated.scenario import Scenario

__all__ = ["Scenario", "SimulatedNode"]
