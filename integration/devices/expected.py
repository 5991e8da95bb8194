"""Which device nodes NVIDIA's driver has on this node, by what procfs says.

Neither NVML nor the driver's files are asked: nodes are needed before either works.

- Control nodes: nvidiactl, nvidia-modeset, nvidia-uvm, nvidia-uvm-tools.
- One for each GPU, except one that the driver was told to exclude.
- One for each capability that there is (of MIG's configuration, monitor, instances; of the
  fabric), with the mode that the kernel module asks for.

IMEX channels are not among them: which ones a node has is for the IMEX service to say.

Source: nvidia-modprobe, modprobe-utils/nvidia-modprobe-utils.c; kernel-open/nvidia/nv-procfs.c
and nv-caps.c of NVIDIA's open kernel modules.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from hooks.config import Config
from hooks.node.capabilities import CONTROL, FRONTEND, MODESET, UVM, UVM_TOOLS
from hooks.node.device_nodes import CAPS, cap_path
from hooks.node.fingerprint import Fingerprint, read_text
from hooks.node.gpus import find_gpus
from hooks.node.host_setup import (
    Wanted,
    capability_mode,
    may_make_nodes,
    node_owner,
    parse_parameters,
)

_CONTROL_NODES: Final = (CONTROL, MODESET, UVM, UVM_TOOLS)

MODULES: Final = {
    CONTROL.path: "nvidia",
    UVM.path: "nvidia-uvm",
    UVM_TOOLS.path: "nvidia-uvm",
    MODESET.path: "nvidia-modeset",
}
"""The kernel module that has to be loaded for a control node to be of use."""


def expected_nodes(config: Config, *, control_only: bool = False) -> list[Wanted]:
    """The nodes that there should be.

    Args:
        config: where procfs is.
        control_only: only those that belong to no GPU and to no capability.

    Returns:
        The nodes, whether or not they are there.
    """
    parameters = parse_parameters(read_text(f"{config.proc}/driver/nvidia/params") or "")
    owner = node_owner(parameters)
    nodes = [
        Wanted(control.path, control.drivers, control.minor, *owner)
        for control in _CONTROL_NODES
        if control.minor is not None
    ]
    if control_only:
        return nodes
    gpus = find_gpus(Fingerprint(config.host_root), config, None).gpus
    nodes += [Wanted(gpu.path, FRONTEND, gpu.minor, *owner) for gpu in gpus]
    return nodes + sorted(_capabilities(config), key=lambda node: node.minor)


def is_forbidden(config: Config) -> bool:
    """Whether the kernel module's parameters say that its nodes are the administrator's to make."""
    text = read_text(f"{config.proc}/driver/nvidia/params") or ""
    return not may_make_nodes(parse_parameters(text))


def _capabilities(config: Config) -> Iterator[Wanted]:
    for directory, _, names in os.walk(f"{config.proc}/driver/nvidia/capabilities"):
        for name in names:
            told = parse_parameters(read_text(os.path.join(directory, name)) or "")
            minor = told.get("DeviceFileMinor", "")
            if minor.isascii() and minor.isdecimal() and told.get("DeviceFileModify") != "0":
                number = int(minor)
                yield Wanted(cap_path(number), CAPS, number, capability_mode(told), 0, 0)
