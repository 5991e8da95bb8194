"""Add GPUs of AMD and Intel to a simulated node: their files in sysfs and their device nodes.

    amd = ["mi300x", "mi300x/8"]     # the second one has eight partitions
    intel = ["flex170", "uhd770"]

As in the kernel: an AMD GPU is a PCI device with a node in KFD's topology. Each further partition
is a platform device ``amdgpu_xcp_N`` with its own node. An Intel GPU is a PCI device with DRM
nodes. The topology lists CPUs before GPUs. DRM numbers continue after NVIDIA's.

Source: drivers/gpu/drm/amd/amdkfd/kfd_topology.c, drivers/gpu/drm/amd/amdxcp/amdgpu_xcp_drv.c.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from integration.simulated.errors import invalid
from integration.simulated.tree import (
    DRM_MAJOR,
    FIRST_RENDER,
    Device,
    NodeTree,
    PciDevice,
    group_of,
    video_group,
)

MOST: Final = 8

_KFD: Final = "sys/devices/virtual/kfd/kfd"


@dataclass(frozen=True, slots=True)
class Model:
    """A model's figures."""

    device: int  # PCI device id
    pci_class: int
    driver: str  # the kernel driver
    partitions: tuple[int, ...] = (1,)  # the possible numbers of partitions


AMD_MODELS: Final = {
    "mi300x": Model(0x74A1, 0x120000, "amdgpu", (1, 2, 4, 8)),
    "mi210": Model(0x740F, 0x038000, "amdgpu"),
    "rx7900": Model(0x744C, 0x030000, "amdgpu"),
}
INTEL_MODELS: Final = {
    "flex170": Model(0x56C0, 0x038000, "i915"),
    "arc770": Model(0x56A0, 0x030000, "i915"),
    "b580": Model(0xE20B, 0x030000, "xe"),
    "uhd770": Model(0x4680, 0x030000, "i915"),
}
_AMD, _INTEL = 0x1002, 0x8086


@dataclass(frozen=True, slots=True)
class VendorGpu:
    """One GPU of AMD or Intel."""

    vendor: int  # its PCI vendor
    key: str  # of the model
    model: Model
    pci: str  # "0000:60:00.0"
    partitions: int  # the number of partitions; 1 for an undivided GPU
    first: int  # the number of its first card node; its partitions' follow

    @property
    def entry(self) -> str:
        """The GPU's entry in a scenario file."""
        return self.key if self.partitions == 1 else f"{self.key}/{self.partitions}"

    @property
    def unique_id(self) -> int:
        """AMD's 64-bit id."""
        return int.from_bytes(hashlib.sha256(f"{self.key} {self.pci}".encode()).digest()[:8])


def parse_vendors(
    amd: Sequence[object], intel: Sequence[object], first: int
) -> tuple[VendorGpu, ...]:
    """Return the GPUs that a scenario lists.

    Args:
        amd: model keys, each optionally with a slash and a number of partitions.
        intel: model keys.
        first: the number of the first free card node.

    Returns:
        AMD's, then Intel's.

    Raises:
        ScenarioInvalid: an unknown model, an impossible number of partitions, or too many GPUs.
    """
    found: list[VendorGpu] = []
    for vendor, key, entries, models, bus in (
        (_AMD, "amd", amd, AMD_MODELS, 0x60),
        (_INTEL, "intel", intel, INTEL_MODELS, 0x40),
    ):
        asked = f"{key} = {list(entries)}"
        if len(entries) > MOST:
            raise invalid(asked, f"more than {MOST}", "list fewer")
        for index, entry in enumerate(entries):
            name, _, parts = str(entry).partition("/")
            model = models.get(name)
            if model is None:
                raise invalid(asked, f"no model {name}", f"use {', '.join(models)}")
            if parts and parts not in map(str, model.partitions):
                cuts = ", ".join(map(str, model.partitions))
                raise invalid(asked, f"{entry} is not possible", f"use {cuts} partitions")
            pci = f"0000:{bus + index:02x}:00.0"
            found.append(VendorGpu(vendor, name, model, pci, int(parts or 1), first))
            first += found[-1].partitions
    return tuple(found)


def add_vendors(tree: NodeTree, gpus: Sequence[VendorGpu]) -> None:
    """Add GPUs to a node."""
    tree.add_major("drm", DRM_MAJOR)
    groups = video_group(), group_of("render", 106)
    xcp = 0
    for gpu in gpus:
        device = PciDevice(
            gpu.pci, gpu.model.driver, gpu.vendor, gpu.model.device, gpu.model.pci_class,
            more={"revision": "0x00", "numa_node": "0"},
        )  # fmt: skip
        tree.add_pci(device)
        tree.add_drm(device.directory, gpu.first, groups, gpu.pci)
        for part in range(1, gpu.partitions):
            tree.add_drm(f"devices/platform/amdgpu_xcp_{xcp}", gpu.first + part, groups)
            xcp += 1
    if amd := [gpu for gpu in gpus if gpu.vendor == _AMD]:
        major = tree.add_major("kfd")
        tree.devices.append(Device("kfd", major, 0, 0o660, groups[1]))
        tree.files[f"{_KFD}/dev"] = f"{major}:0\n"
        tree.links["sys/class/kfd/kfd"] = _KFD
        _add_topology(tree, amd)


def _add_topology(tree: NodeTree, gpus: Sequence[VendorGpu]) -> None:
    """Add KFD's nodes: one CPU, then each partition of each GPU."""
    cpu = "cpu_cores_count 8\nsimd_count 0\ndrm_render_minor 0\n"
    nodes = [{"gpu_id": "0", "name": "", "properties": cpu}]
    for gpu in gpus:
        bus = int(gpu.pci.split(":")[1], 16)
        for part in range(gpu.partitions):
            properties = (
                "cpu_cores_count 0\nsimd_count 1216\n"
                f"vendor_id {gpu.vendor}\ndevice_id {gpu.model.device}\n"
                f"location_id {part << 28 | bus << 8}\ndomain 0\n"
                f"drm_render_minor {FIRST_RENDER + gpu.first + part}\n"
                f"unique_id {gpu.unique_id}\n"
            )
            number = f"{gpu.unique_id % 65521 + part + 1}"
            nodes.append({"gpu_id": number, "name": gpu.key, "properties": properties})
    for index, files in enumerate(nodes):
        for name, text in files.items():
            tree.files[f"{_KFD}/topology/nodes/{index}/{name}"] = text.rstrip("\n") + "\n"
