"""GPUs of AMD and Intel on a simulated node: their files in sysfs, and their device nodes.

    amd = ["mi300x", "mi300x/8"]     # the second one is cut into eight partitions
    intel = ["flex170", "uhd770"]

As the kernel has it: an AMD GPU is a PCI device with a node of KFD's topology, and each further
partition of it a platform device ``amdgpu_xcp_N`` with a node of its own; an Intel GPU is a PCI
device with DRM nodes. Nodes of the topology before those of GPUs are CPUs. All DRM nodes are
numbered on after NVIDIA's.

Source: drivers/gpu/drm/amd/amdkfd/kfd_topology.c, drivers/gpu/drm/amd/amdxcp/amdgpu_xcp_drv.c.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from integration.errors import ScenarioInvalid
from integration.simulated.devices import (
    DRM_MAJOR,
    Node,
    free_majors,
    group_of,
    make_nodes,
)
from integration.simulated.tree import write_links, write_tree

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST: Final = 8

_FIRST_RENDER: Final = 128


@dataclass(frozen=True, slots=True)
class Model:
    """What a model says of itself.

    Attributes:
        device: PCI device id.
        pci_class: PCI class.
        driver: the kernel driver.
        partitions: into how many it can be cut.
    """

    device: int
    pci_class: int
    driver: str
    partitions: tuple[int, ...] = (1,)


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
    """One GPU that is not NVIDIA's.

    Attributes:
        vendor: its PCI vendor.
        key: its model's key.
        model: its model.
        pci: "0000:60:00.0".
        partitions: into how many it is cut; 1 for not at all.
        first: the number of its first card node; its partitions' follow.
    """

    vendor: int
    key: str
    model: Model
    pci: str
    partitions: int
    first: int

    @property
    def unique_id(self) -> int:
        """AMD's 64-bit id."""
        return int.from_bytes(hashlib.sha256(f"{self.key} {self.pci}".encode()).digest()[:8])

    @property
    def drm(self) -> tuple[tuple[str, str], ...]:
        """Names of the card node and the render node of each partition."""
        numbers = range(self.first, self.first + self.partitions)
        return tuple((f"card{n}", f"renderD{_FIRST_RENDER + n}") for n in numbers)


def parse_vendors(
    amd: Sequence[object], intel: Sequence[object], first: int
) -> tuple[VendorGpu, ...]:
    """The GPUs that a scenario lists.

    Args:
        amd: keys of models, each with a slash and a number of partitions if it has any.
        intel: keys of models.
        first: the number of the first card node that is free.

    Returns:
        AMD's, then Intel's.

    Raises:
        ScenarioInvalid: there is no such model, it cannot be cut so, or there are too many.
    """
    found: list[VendorGpu] = []
    for vendor, key, entries, models, bus in (
        (_AMD, "amd", amd, AMD_MODELS, 0x60),
        (_INTEL, "intel", intel, INTEL_MODELS, 0x40),
    ):
        if len(entries) > MOST:
            raise _invalid(key, entries, f"more than {MOST}", "list fewer")
        for index, entry in enumerate(entries):
            name, _, parts = str(entry).partition("/")
            model = models.get(name)
            if model is None:
                raise _invalid(key, entries, f"no model {name}", f"use {', '.join(models)}")
            if parts and parts not in map(str, model.partitions):
                cuts = ", ".join(map(str, model.partitions))
                raise _invalid(key, entries, f"{entry} is not to be had", f"cut it into {cuts}")
            pci = f"0000:{bus + index:02x}:00.0"
            found.append(VendorGpu(vendor, name, model, pci, int(parts or 1), first))
            first += found[-1].partitions
    return tuple(found)


def entry_of(gpu: VendorGpu) -> str:
    """What a scenario writes for a GPU."""
    return gpu.key if gpu.partitions == 1 else f"{gpu.key}/{gpu.partitions}"


def add_vendors(directory: str, gpus: Sequence[VendorGpu]) -> None:
    """Add GPUs to a node.

    Args:
        directory: the node's, with its ``dev``, ``proc/devices`` and ``sys``.
        gpus: what it has beside NVIDIA's.
    """
    amd = [gpu for gpu in gpus if gpu.vendor == _AMD]
    kfd = _add_majors(os.path.join(directory, "proc/devices"), with_kfd=bool(amd))
    _add_nodes(os.path.join(directory, "dev"), gpus, kfd if amd else None)
    files: dict[str, str] = {}
    links: dict[str, str] = {}
    xcp = 0
    for gpu in gpus:
        device = f"devices/pci{gpu.pci[:7]}/{gpu.pci}"
        files |= {f"{device}/{name}": text for name, text in _attributes(gpu).items()}
        driver = f"bus/pci/drivers/{gpu.model.driver}"
        os.makedirs(os.path.join(directory, "sys", driver), exist_ok=True)
        links[f"{device}/driver"] = driver
        links[f"bus/pci/devices/{gpu.pci}"] = device
        links[f"{driver}/{gpu.pci}"] = device
        for part, names in enumerate(gpu.drm):
            owner = device
            if part:
                owner = f"devices/platform/amdgpu_xcp_{xcp}"
                xcp += 1
            numbers = (gpu.first + part, _FIRST_RENDER + gpu.first + part)
            for name, minor in zip(names, numbers, strict=True):
                node = f"{owner}/drm/{name}"
                files[f"{node}/dev"] = f"{DRM_MAJOR}:{minor}\n"
                links[f"{node}/device"] = owner
                links[f"class/drm/{name}"] = node
                links[f"dev/char/{DRM_MAJOR}:{minor}"] = node
    if amd:
        files |= _topology(amd)
        files["devices/virtual/kfd/kfd/dev"] = f"{kfd}:0\n"
        links["class/kfd/kfd"] = "devices/virtual/kfd/kfd"
    write_tree(os.path.join(directory, "sys"), files)
    write_links(os.path.join(directory, "sys"), links)


def _add_majors(path: str, *, with_kfd: bool) -> int:
    """Adds drm and kfd to the node's /proc/devices; the major of kfd."""
    with open(path, encoding="ascii") as file:
        text = file.read()
    kfd = next(free_majors(text))
    character, _, block = text.partition("\n\n")
    title, *lines = character.splitlines()
    wanted = [f"{DRM_MAJOR:3} drm", *([f"{kfd:3} kfd"] if with_kfd else [])]
    lines = sorted({*lines, *wanted}, key=lambda line: int(line.split()[0]))
    os.unlink(path)
    write_tree(
        os.path.dirname(path), {os.path.basename(path): "\n".join([title, *lines]) + f"\n\n{block}"}
    )
    return kfd


def _add_nodes(dev: str, gpus: Sequence[VendorGpu], kfd: int | None) -> None:
    video, render = group_of("video", 44), group_of("render", 106)
    nodes = [] if kfd is None else [Node("kfd", kfd, 0, 0o660, render)]
    for gpu in gpus:
        for part, (card, worker) in enumerate(gpu.drm):
            number = gpu.first + part
            nodes.append(Node(f"dri/{card}", DRM_MAJOR, number, 0o660, video))
            nodes.append(Node(f"dri/{worker}", DRM_MAJOR, _FIRST_RENDER + number, 0o660, render))
    make_nodes(dev, nodes)
    by_path = os.path.join(dev, "dri/by-path")
    os.makedirs(by_path, exist_ok=True)
    for gpu in gpus:
        card, worker = gpu.drm[0]
        os.symlink(f"../{card}", os.path.join(by_path, f"pci-{gpu.pci}-card"))
        os.symlink(f"../{worker}", os.path.join(by_path, f"pci-{gpu.pci}-render"))


def _attributes(gpu: VendorGpu) -> dict[str, str]:
    return {
        "vendor": f"0x{gpu.vendor:04x}\n",
        "device": f"0x{gpu.model.device:04x}\n",
        "class": f"0x{gpu.model.pci_class:06x}\n",
        "revision": "0x00\n",
        "numa_node": "0\n",
        "uevent": (
            f"DRIVER={gpu.model.driver}\n"
            f"PCI_CLASS={gpu.model.pci_class:X}\n"
            f"PCI_ID={gpu.vendor:04X}:{gpu.model.device:04X}\n"
            f"PCI_SLOT_NAME={gpu.pci}\n"
        ),
    }


def _topology(gpus: Sequence[VendorGpu]) -> dict[str, str]:
    """KFD's nodes: one CPU, then each partition of each GPU."""
    below = "devices/virtual/kfd/kfd/topology/nodes"
    files = {
        f"{below}/0/gpu_id": "0\n",
        f"{below}/0/name": "\n",
        f"{below}/0/properties": "cpu_cores_count 8\nsimd_count 0\ndrm_render_minor 0\n",
    }
    number = 1
    for gpu in gpus:
        bus = int(gpu.pci.split(":")[1], 16)
        for part in range(gpu.partitions):
            files[f"{below}/{number}/gpu_id"] = f"{gpu.unique_id % 65521 + part + 1}\n"
            files[f"{below}/{number}/name"] = f"{gpu.key}\n"
            files[f"{below}/{number}/properties"] = (
                "cpu_cores_count 0\nsimd_count 1216\n"
                f"vendor_id {gpu.vendor}\ndevice_id {gpu.model.device}\n"
                f"location_id {part << 28 | bus << 8}\ndomain 0\n"
                f"drm_render_minor {_FIRST_RENDER + gpu.first + part}\n"
                f"unique_id {gpu.unique_id}\n"
            )
            number += 1
    return files


def _invalid(key: str, entries: Sequence[object], found: str, do: str) -> ScenarioInvalid:
    return ScenarioInvalid(f"a simulated node with {key} = {list(entries)}", found=found, do=do)
