"""Grant a vendor's GPUs: turn a request and the node's GPUs into a plan.

Rules
- A GPU is usable if its render node is. It is an error to name an unusable one; ``all`` leaves it
  out with a note, and is an error if nothing is left.
- A GPU comes with its card node, if it has one, because Vulkan and VA-API open it.
- If not everyone may open a node, its group is added as a supplementary group.
- ``class/drm/NAME`` is a link to ``…/DEVICE/drm/NAME``, so the link itself names the device. The
  two nodes of one device belong together: ``cardN`` for display, ``renderDN`` for computing.
- Connectors (``card0-DP-1``) are not nodes.
- udev creates the links in ``/dev/dri/by-path``. A container gets those to its own nodes, with the
  same names as on the host.

Source: Documentation/gpu/drm-uapi.rst, "Render nodes"; systemd's rules.d/60-drm.rules.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from api.values import dataclass
from hooks.config import Config
from hooks.errors import GpuExcluded, NoVendorGpus, UnknownVendorGpu, VendorNodeMissing, enumerated
from hooks.node.device_nodes import look_at_node
from hooks.node.fingerprint import read_line, read_names
from hooks.plan import (
    Bounds,
    Contribution,
    Device,
    LinkDirectory,
    Missing,
    Plan,
    device_of,
    groups_of,
)
from hooks.vendors.names import Item, Range, VendorRequest
from hooks.words import Node, quotes_in

DRM: Final = "drm"
"""The driver's name in /proc/devices."""

_BY_PATH: Final = "/dev/dri/by-path"
_NODES: Final = ("card", "renderD")


@dataclass(frozen=True, slots=True)
class DrmDevice:
    """A device with nodes below /dev/dri."""

    name: str  # its name on its bus ("0000:03:00.0", "amdgpu_xcp_1")
    vendor: str  # its PCI vendor, as sysfs writes it ("0x8086"); "" on another bus
    pci_class: str  # its PCI class ("0x030000"); "" on another bus
    device_id: str  # its PCI device id ("0x56a0"); "" on another bus
    driver: str  # the name of its kernel driver; "" if unknown
    minors: dict[str, int]  # the minor numbers of its nodes, by their names ("renderD128")

    @property
    def render_node(self) -> str | None:
        """The name of the node for computing; None if the device is only for display."""
        return next((name for name in self.minors if name.startswith("renderD")), None)


def drm_devices(config: Config) -> tuple[DrmDevice, ...]:
    """Return the node's DRM devices, in no particular order."""
    directory = f"{config.sys}/class/drm"
    nodes: dict[str, list[str]] = {}
    for name in read_names(directory) or ():
        if not any(name.removeprefix(kind).isdecimal() for kind in _NODES):
            continue
        try:
            target = os.readlink(f"{directory}/{name}")
        except OSError:
            continue
        nodes.setdefault(os.path.basename(os.path.dirname(os.path.dirname(target))), []).append(
            name
        )
    return tuple(_device(directory, device, names) for device, names in nodes.items())


def _device(directory: str, name: str, nodes: list[str]) -> DrmDevice:
    device = f"{directory}/{nodes[0]}/device"
    minors = {node: _minor(f"{directory}/{node}/dev") for node in nodes}
    try:
        driver = os.path.basename(os.readlink(f"{device}/driver"))
    except OSError:
        driver = ""
    return DrmDevice(
        name=name,
        vendor=read_line(f"{device}/vendor"),
        pci_class=read_line(f"{device}/class"),
        device_id=read_line(f"{device}/device"),
        driver=driver,
        minors={node: minor for node, minor in minors.items() if minor is not None},
    )


def _minor(path: str) -> int | None:
    minor = read_line(path).partition(":")[2]
    return int(minor) if minor.isdecimal() else None


def by_path_links(config: Config, nodes: Collection[str], reason: str) -> tuple[LinkDirectory, ...]:
    """Return the host's links in /dev/dri/by-path to these nodes: one directory, or none."""
    directory = config.dev + _BY_PATH.removeprefix("/dev")
    links = []
    for name in read_names(directory) or ():
        try:
            target = os.path.basename(os.readlink(f"{directory}/{name}"))
        except OSError:
            continue
        if target in nodes:
            links.append((name, f"../{target}"))
    return (LinkDirectory(_BY_PATH, tuple(links), reason),) if links else ()


@dataclass(frozen=True, slots=True)
class VendorGpu:
    """A GPU, or a partition of a GPU with its own nodes."""

    vendor: str  # for example "AMD"
    index: int  # its place in PCI bus order, and among its GPU's partitions
    address: str
    device: DrmDevice
    names: frozenset[str]  # its names besides its index, in lower case

    def __str__(self) -> str:
        return f"{self.vendor} GPU {self.index} ({self.address})"


def granted(
    wanted: VendorRequest,
    gpus: tuple[VendorGpu, ...],
    config: Config,
    *,
    vendor: str,
    majors: Mapping[str, int],
    common: tuple[Node, ...] = (),
    notes: Iterable[str] = (),
) -> Contribution:
    """Return the edits for a vendor's GPUs.

    Args:
        majors: the major numbers allowed for its devices, by driver, including "drm".

    Raises:
        UnknownVendorGpu: this node does not have a named GPU.
        GpuExcluded: a named GPU is excluded by the configuration.
        NoVendorGpus: all GPUs are requested, but none is usable.
        VendorNodeMissing: a named GPU has no usable render node.
    """
    chosen = gpus if wanted.everything else _named(wanted, gpus, vendor)
    devices = [device_of(node, f"{vendor} GPUs") for node in common]
    missing: list[Missing] = []
    faults: list[str] = []
    given: list[VendorGpu] = []
    broken = False
    for gpu in _not_excluded(chosen, wanted, config, faults):
        nodes, wrong = _nodes(gpu, config, majors)
        if gpu.device.render_node in wrong:
            fault = wrong[gpu.device.render_node]
            if not wanted.everything:
                raise VendorNodeMissing(f"{gpu} ({wanted.source})", found=fault, do=_SEE_UDEV)
            faults.append(f"{gpu}: {fault}")
            broken = True
            continue
        given.append(gpu)
        devices += nodes
        missing += [Missing(f"/dev/dri/{name}", (why,)) for name, why in wrong.items()]
    if not given:
        raise NoVendorGpus(
            f"all {vendor} GPUs ({wanted.source})",
            found=enumerated((*faults, *notes), "; ") or f"this node has no {vendor} GPU",
            do=_SEE_UDEV if broken else "",
        )
    names = {name for gpu in given for name in gpu.device.minors}
    plan = Plan(
        devices=tuple(devices),
        additional_gids=groups_of(devices),
        missing=tuple(missing),
        link_directories=by_path_links(config, names, f"{vendor} GPUs"),
    )
    return Contribution(
        plan,
        Bounds(frozenset(majors.values())),
        vendor=vendor,
        granted=tuple(map(str, given)),
        notes=(*notes, *faults),
    )


_SEE_UDEV = "see that udev has made the nodes in /dev/dri"


def _not_excluded(
    chosen: Iterable[VendorGpu], wanted: VendorRequest, config: Config, faults: list[str]
) -> list[VendorGpu]:
    """Return the GPUs that are not excluded; add the others to ``faults``."""
    left = []
    for gpu in chosen:
        if gpu.address not in config.excluded_gpus:
            left.append(gpu)
        elif wanted.everything:
            faults.append(f"{gpu} is excluded by the configuration")
        else:
            raise GpuExcluded(
                f"{gpu} ({wanted.source})",
                found="it is excluded by the configuration",
                do="name another, or take it out of exclude-gpus",
            )
    return left


def _named(
    wanted: VendorRequest, gpus: tuple[VendorGpu, ...], vendor: str
) -> tuple[VendorGpu, ...]:
    chosen = set()
    for item in wanted.items:
        found = _matching(item, gpus)
        if not found:
            raise UnknownVendorGpu(
                f"{vendor} GPU {item} ({wanted.source})",
                found=f"{_describe(gpus, vendor)}{quotes_in(str(item))}",
                do="name one of these by index, range or PCI address, or all",
            )
        chosen |= found
    return tuple(gpu for gpu in gpus if gpu.index in chosen)


def _matching(item: Item, gpus: tuple[VendorGpu, ...]) -> set[int]:
    """Return the indices in an item; none if an index in a range does not exist."""
    if isinstance(item, Range):
        return set(range(item.first, item.last + 1)) if item.last < len(gpus) else set()
    return {gpu.index for gpu in gpus if item in gpu.names}


def _describe(gpus: tuple[VendorGpu, ...], vendor: str) -> str:
    if not gpus:
        return f"this node has no {vendor} GPU"
    listed = enumerated(f"{gpu.index} ({gpu.address})" for gpu in gpus)
    return f"this node has {vendor} GPU {listed}"


def _nodes(
    gpu: VendorGpu, config: Config, majors: Mapping[str, int]
) -> tuple[list[Device], dict[str, str]]:
    """Return a GPU's usable nodes, and the faults of the others by name."""
    usable, wrong = [], {}
    for name, minor in gpu.device.minors.items():
        drm = [majors[DRM]] if DRM in majors else []
        seen = look_at_node(config, f"/dev/dri/{name}", drm, minor, DRM)
        if isinstance(seen, Node):
            usable.append(device_of(seen, str(gpu)))
        else:
            wrong[name] = seen
    return usable, wrong
