"""The device nodes that NVIDIA's driver has according to procfs.

The list comes from procfs alone, since NVML and the driver's files do not work without nodes.

- Control nodes: nvidiactl, nvidia-modeset, nvidia-uvm, nvidia-uvm-tools.
- One for each GPU, except GPUs that the driver is configured to exclude.
- One for each existing capability (MIG's configuration, monitor and instances; the fabric), with
  the mode that the kernel module wants.
- IMEX channels whose number differs from what the kernel says. (The IMEX service creates the
  others.)

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
    stale_channels,
)

_CONTROL_NODES: Final = (CONTROL, MODESET, UVM, UVM_TOOLS)

MODULES: Final = {
    CONTROL.path: "nvidia",
    UVM.path: "nvidia-uvm",
    UVM_TOOLS.path: "nvidia-uvm",
    MODESET.path: "nvidia-modeset",
}
"""The kernel module without which a control node does not work."""


def expected_nodes(config: Config, *, control_only: bool = False) -> list[Wanted]:
    """Return the nodes that should exist.

    Args:
        config: where procfs is.
        control_only: leave out nodes of GPUs and capabilities.

    Returns:
        The nodes, whether or not they exist.
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
    nodes += sorted(_capabilities(config), key=lambda node: node.minor)
    return nodes + stale_channels(config)


def is_forbidden(config: Config) -> bool:
    """Return whether the kernel module keeps others from making its nodes (ModifyDeviceFiles)."""
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
