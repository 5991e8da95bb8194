"""The labels of a node, with the names that GPU feature discovery (GFD) uses.

GFD writes some values under two names, of which one is deprecated; clusters select by both.

Source: NVIDIA's k8s-device-plugin, internal/lm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

DOMAIN: Final = "nvidia.com/"

GPU: Final = "gpu"
"""The prefix of the labels of GPUs, which are those of MIG devices with ``migStrategy: single``."""

NODE: Final[Mapping[str, str]] = {
    "gpu.present": "`true`",
    "gpu.machine": "the machine's product name",
    "gpu.mode": "`compute` (3D controllers), `graphics` (VGA controllers), or `unknown` (both)",
    "gpu.family": "`ampere`, `ada-lovelace`, `hopper`, `blackwell` …",
    "gpu.clique": "`CLUSTER.CLIQUE` of the NVLink fabric, if all GPUs in one have the same",
    "gpu.compute.major": "CUDA compute capability",
    "gpu.compute.minor": "CUDA compute capability",
    "cuda.driver-version.full": "version of the driver",
    "cuda.driver-version.major": "parts of the driver's version",
    "cuda.driver-version.minor": "parts of the driver's version",
    "cuda.driver-version.revision": "parts of the driver's version",
    "cuda.driver.major": "the same driver version, deprecated",
    "cuda.driver.minor": "the same driver version, deprecated",
    "cuda.driver.rev": "the same driver version, deprecated",
    "cuda.runtime-version.full": "newest CUDA that the driver supports",
    "cuda.runtime-version.major": "parts of this CUDA version",
    "cuda.runtime-version.minor": "parts of this CUDA version",
    "cuda.runtime.major": "the same CUDA version, deprecated",
    "cuda.runtime.minor": "the same CUDA version, deprecated",
    "mig.capable": "whether a GPU has a MIG mode",
    "mig.strategy": "`single` or `mixed`",
    "mps.capable": "whether the device plugin shares GPUs by MPS",
    "vgpu.present": "whether a GPU is a vGPU of a hypervisor",
}
"""The labels of the node as a whole, without the domain, with what they say."""

DEVICES: Final[Mapping[str, str]] = {
    "product": "the model; `-MIG-` and the profile; `-SHARED` if shared under the same name",
    "count": "number of GPUs of that model, or of MIG devices",
    "replicas": "shares of each device",
    "sharing-strategy": "`none`, `time-slicing` or `mps`",
    "memory": "MiB of each device",
}
"""The labels of GPUs and of MIG devices, after their prefix and a dot."""

MIG: Final[Mapping[str, str]] = {
    "multiprocessors": "number of multiprocessors",
    "engines.copy": "number of engines",
    "engines.decoder": "number of engines",
    "engines.encoder": "number of engines",
    "engines.jpeg": "number of engines",
    "engines.ofa": "number of engines",
    "slices.gi": "slices of the GPU instance",
    "slices.ci": "slices of the compute instance",
}
"""The labels of MIG devices only."""

_OURS: Final = re.compile(
    rf"{re.escape(DOMAIN)}(?:{'|'.join(map(re.escape, NODE))}|"
    rf"(?:{GPU}|mig-[^/]+)\.(?:{'|'.join(map(re.escape, (*DEVICES, *MIG)))}))"
)


def is_label(name: str) -> bool:
    """Return whether a label of a Node is one of these, so that one that is stale is removed."""
    return _OURS.fullmatch(name) is not None
