"""From what is asked of a vendor's GPUs, and what the node has, to what the container gets.

Rules
- A GPU can be used if its render node can. One that was named and cannot is an error; of
  ``all``, it is left out and noted, and it is an error if nothing is left.
- Whoever gets a GPU gets its card node as well, if there is one: Vulkan and VA-API open it.
- A node that not everybody may open brings its group as a supplementary group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hooks.edits.plan import Contribution, Missing, Plan, device_of, groups_of
from hooks.node.gpus import Node, look_at_node
from hooks.requests.policy_errors import GpuExcluded
from hooks.vendors.drm import DRM, by_path_links
from hooks.vendors.errors import NoVendorGpus, UnknownVendorGpu, VendorNodeMissing
from hooks.vendors.names import Range

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hooks.config import Config
    from hooks.edits.plan import Device
    from hooks.vendors.drm import DrmDevice
    from hooks.vendors.names import Asked, Item

__all__ = ["VendorGpu", "granted"]


@dataclass(frozen=True, slots=True)
class VendorGpu:
    """A GPU, or a partition of one that has nodes of its own.

    Attributes:
        vendor: whose it is ("AMD").
        index: its place in PCI bus order, and among its GPU's partitions.
        address: the PCI address of the GPU.
        device: its DRM device.
        names: what it is called beside its index, in lower case.
    """

    vendor: str
    index: int
    address: str
    device: DrmDevice
    names: frozenset[str]

    def __str__(self) -> str:
        return f"{self.vendor} GPU {self.index} ({self.address})"


def granted(
    asked: Asked,
    gpus: tuple[VendorGpu, ...],
    config: Config,
    *,
    vendor: str,
    majors: Mapping[str, int],
    common: tuple[Node, ...] = (),
    notes: Iterable[str] = (),
) -> Contribution:
    """What a container gets of a vendor's GPUs.

    Args:
        asked: what it asks for.
        gpus: what the node has, by index.
        config: where the device nodes are.
        vendor: whose they are, for people.
        majors: the major numbers that its devices may have, by driver; "drm" among them.
        common: nodes that come with every GPU.
        notes: what did not fit together on the node, for people.

    Returns:
        The plan and its bounds.

    Raises:
        UnknownVendorGpu: a GPU is named that this node does not have.
        GpuExcluded: a GPU is named that the configuration excludes.
        NoVendorGpus: all are asked for, and there is none that could be given.
        VendorNodeMissing: a GPU that is named has no usable render node.
    """
    chosen = gpus if asked.everything else _named(asked, gpus, vendor)
    devices = [device_of(node, f"{vendor} GPUs") for node in common]
    missing: list[Missing] = []
    faults: list[str] = []
    given: list[VendorGpu] = []
    broken = False
    for gpu in _not_excluded(chosen, asked, config, faults):
        nodes, wrong = _nodes(gpu, config, majors)
        if gpu.device.render_node in wrong:
            fault = wrong[gpu.device.render_node]
            if not asked.everything:
                raise VendorNodeMissing(f"{gpu} ({asked.source})", found=fault, do=_SEE_UDEV)
            faults.append(f"{gpu}: {fault}")
            broken = True
            continue
        given.append(gpu)
        devices += nodes
        missing += [Missing(f"/dev/dri/{name}", (why,)) for name, why in wrong.items()]
    if not given:
        raise NoVendorGpus(
            f"all {vendor} GPUs ({asked.source})",
            found=_enumerate((*faults, *notes)) or f"this node has no {vendor} GPU",
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
        frozenset(majors.values()),
        (),
        vendor=vendor,
        granted=tuple(map(str, given)),
        notes=(*notes, *faults),
    )


_SEE_UDEV = "see that udev has made the nodes in /dev/dri"


def _not_excluded(
    chosen: Iterable[VendorGpu], asked: Asked, config: Config, faults: list[str]
) -> list[VendorGpu]:
    """Those that are not excluded; that others are, is added to ``faults``."""
    left = []
    for gpu in chosen:
        if gpu.address not in config.excluded_gpus:
            left.append(gpu)
        elif asked.everything:
            faults.append(f"{gpu} is excluded by the configuration")
        else:
            raise GpuExcluded(
                f"{gpu} ({asked.source})",
                found="it is excluded by the configuration",
                do="name another, or take it out of exclude-gpus",
            )
    return left


def _named(asked: Asked, gpus: tuple[VendorGpu, ...], vendor: str) -> tuple[VendorGpu, ...]:
    chosen = set()
    for item in asked.items:
        found = _matching(item, gpus)
        if not found:
            raise UnknownVendorGpu(
                f"{vendor} GPU {item} ({asked.source})",
                found=_there_is(gpus, vendor),
                do="name one of these by index, range or PCI address, or all",
            )
        chosen |= found
    return tuple(gpu for gpu in gpus if gpu.index in chosen)


def _matching(item: Item, gpus: tuple[VendorGpu, ...]) -> set[int]:
    """The indices that an item means; none if any index of a range is not there."""
    if isinstance(item, Range):
        return set(range(item.first, item.last + 1)) if item.last < len(gpus) else set()
    return {gpu.index for gpu in gpus if item in gpu.names}


_MOST_NAMED = 8


def _there_is(gpus: tuple[VendorGpu, ...], vendor: str) -> str:
    if not gpus:
        return f"this node has no {vendor} GPU"
    listed = _enumerate((f"{gpu.index} ({gpu.address})" for gpu in gpus), ", ")
    return f"this node has {vendor} GPU {listed}"


def _enumerate(items: Iterable[str], separator: str = "; ") -> str:
    """A list for people; a message is one line, and a node may have 64 partitions."""
    every = list(items)
    more = f" and {len(every) - _MOST_NAMED} more" if len(every) > _MOST_NAMED else ""
    return separator.join(every[:_MOST_NAMED]) + more


def _nodes(
    gpu: VendorGpu, config: Config, majors: Mapping[str, int]
) -> tuple[list[Device], dict[str, str]]:
    """The usable nodes of a GPU, and what is wrong with the others by their names."""
    usable, wrong = [], {}
    for name, minor in gpu.device.minors.items():
        drm = [majors[DRM]] if DRM in majors else []
        seen = look_at_node(config, f"/dev/dri/{name}", drm, minor, DRM)
        if isinstance(seen, Node):
            usable.append(device_of(seen, str(gpu)))
        else:
            wrong[name] = seen
    return usable, wrong
