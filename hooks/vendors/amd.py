"""AMD's GPUs, as listed by the kernel's compute driver (KFD).

Rules
- A GPU is a node of KFD's topology with a ``gpu_id``; nodes of CPUs have 0. A GPU that KFD does not
  list cannot compute, and AMD's own toolkit omits it too.
- A GPU in a partitioning mode (CPX, DPX …) has one node for each partition: the first one has the
  PCI device's render node, the others those of platform devices ``amdgpu_xcp_N``. Each partition
  has its own index, and can be granted by itself.
- Indices follow the PCI address, then the number of the render node: the order of AMD's toolkit.
- Every container with an AMD GPU gets /dev/kfd, which is common to all GPUs. A process may use
  those whose render nodes it can open.

Source: drivers/gpu/drm/amd/amdkfd/kfd_topology.c, in which ``location_id`` has the bus, device
and function in its lower 16 bits and the partition in the upper four; AMD Container Toolkit,
"GPU Partitioning".
"""

from __future__ import annotations

from typing import Final

from hooks.config import Config
from hooks.errors import NoVendorDriver
from hooks.node.device_nodes import look_at_node, read_majors
from hooks.node.fingerprint import read_line, read_names, read_text
from hooks.node.gpus import bus_order
from hooks.plan import Contribution
from hooks.vendors.gpus import DRM, DrmDevice, VendorGpu, drm_devices, granted
from hooks.vendors.names import VendorRequest, address_names, unique_names
from hooks.words import Node

VENDOR: Final = "AMD"
KFD: Final = "kfd"
_NODES: Final = "class/kfd/kfd/topology/nodes"


def give(wanted: VendorRequest, config: Config) -> Contribution:
    """Return the edits for the node's AMD GPUs.

    Raises:
        NoVendorDriver: there is no usable /dev/kfd.
        RequestError, InventoryError: as for :func:`hooks.vendors.gpus.granted`.
    """
    majors = {name: major for name, major in read_majors(config).items() if name in {KFD, DRM}}
    kfd = look_at_node(config, "/dev/kfd", [majors[KFD]] if KFD in majors else [], 0, KFD)
    if not isinstance(kfd, Node):
        raise NoVendorDriver(
            f"AMD GPUs ({wanted.source})",
            found=kfd,
            do="load the kernel module amdgpu on the node",
        )
    gpus, notes = find(config)
    return granted(wanted, gpus, config, vendor=VENDOR, majors=majors, common=(kfd,), notes=notes)


def find(config: Config) -> tuple[tuple[VendorGpu, ...], list[str]]:
    """Return the node's AMD GPUs and partitions by index, and notes for display."""
    by_render = {device.render_node: device for device in drm_devices(config)}
    found: list[tuple[tuple[int, ...], int, str, DrmDevice, int]] = []
    notes = []
    for name in read_names(f"{config.sys}/{_NODES}") or ():
        node = f"{config.sys}/{_NODES}/{name}"
        if read_line(f"{node}/gpu_id") in {"", "0"}:
            continue
        properties = _properties(f"{node}/properties")
        minor = properties.get("drm_render_minor", 0)
        device = by_render.get(f"renderD{minor}")
        if device is None:
            notes.append(f"KFD's node {name} has no render node in sysfs; it is left out")
            continue
        address = _address(properties)
        found.append((bus_order(address), minor, address, device, properties.get("unique_id", 0)))
    found.sort(key=lambda each: each[:2])
    gpus = tuple(
        VendorGpu(
            vendor=VENDOR,
            index=index,
            address=address,
            device=device,
            names=frozenset(
                {
                    *address_names(address, device.device_id),
                    *unique_names(unique_id),
                    *map(str.lower, device.minors),
                }
            ),
        )
        for index, (_, _, address, device, unique_id) in enumerate(found)
    )
    return gpus, notes


def _properties(path: str) -> dict[str, int]:
    """Return the numbers that KFD lists, one ``name value`` a line."""
    lines = (line.split() for line in (read_text(path) or "").splitlines())
    return {
        words[0]: int(words[1]) for words in lines if len(words) == _PAIR and words[1].isdecimal()
    }


_PAIR: Final = 2


def _address(properties: dict[str, int]) -> str:
    location = properties.get("location_id", 0)
    bus, device, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 7
    return f"{properties.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function}"
