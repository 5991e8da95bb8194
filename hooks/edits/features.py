"""Devices other than GPUs: fabric, storage and network devices that work with GPUs.

==============  ===============================================  ==========================
feature         nodes                                            and mounts
==============  ===============================================  ==========================
``gds``         /dev/nvidia-fs0…                                 /run/udev, /etc/cufile.json
``mofed``       /dev/infiniband/uverbs0…, rdma_cm
``gdrcopy``     /dev/gdrdrv
``nvswitch``    /dev/nvidia-nvswitchctl, nvidia-nvswitch0…
``mig-config``  the capability node of mig/config
``mig-monitor`` the capability node of mig/monitor
``management``  every node of NVIDIA's driver, also of           the driver's files but those
                capabilities and IMEX channels; not those of     of graphics
                nvidia-fs, nvidia-nvswitch and nvidia-nvlink
IMEX channels   /dev/nvidia-caps-imex-channels/channel0…
==============  ===============================================  ==========================

Rules
- A node counts if it is a character device with its driver's major number in /proc/devices (for
  rdma_cm, a "misc" device, with its minor number in /proc/misc).
- A named IMEX channel or MIG capability that does not exist is an error, because the container
  cannot work without it. Other absent devices are only listed as missing, because images and charts
  request them on nodes with and without them.
- A feature adds no other driver files; those come with a GPU.
- A node that already comes with the container's GPUs is not added again.

For mig-config and mig-monitor, NVIDIA's older tool mounts /proc/driver/nvidia/capabilities and all
of /dev/nvidia-caps. The former exists anyway in the container's procfs. Of the latter, the
container could open only one node, which it gets.

Source: NVIDIA Container Toolkit, pkg/nvcdi (gds, mofed, gdrcopy, nvswitch, imex, management);
libnvidia-container, src/nvc_mount.c; the MIG user guide, "Device Nodes and Capabilities".
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from api.values import dataclass, replace
from hooks.config import Config
from hooks.edits.exclusions import excluded_numbers
from hooks.edits.grant import Grant
from hooks.edits.planning import make_plan
from hooks.errors import ImexChannelMissing, MigCapabilityMissing
from hooks.image.layout import Layout
from hooks.node.device_nodes import (
    CAPS,
    IMEX_DIRECTORY,
    IMEX_DRIVER,
    cap_minors,
    cap_path,
    look_at_node,
    read_majors,
)
from hooks.node.fingerprint import Fingerprint, read_names, read_text
from hooks.node.inventory import Inventory
from hooks.plan import Bounds, Contribution, Device, Missing, Mount, Plan, device_of, groups_of
from hooks.requests.request import Request
from hooks.words import Capability, Feature, Node

MANAGEMENT_CAPABILITIES: Final = frozenset(
    {Capability.COMPUTE, Capability.UTILITY, Capability.VIDEO, Capability.NGX}
)
"""The capabilities whose files come with management: all without a display."""

MOST_CHANNELS: Final = 1 << 20
"""A device number has 20 bits for the minor number, which is the channel's number."""

_MISC: Final = "misc"


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Device nodes of one driver."""

    directory: str  # their directory in the container
    name: str  # the prefix of their names; a number follows
    driver: str  # its name in /proc/devices, or in /proc/misc for a misc device
    numbered: bool = True  # whether a number follows the name
    minor: int | None = None  # the minor number, if known
    misc: bool = False  # whether it is a misc device


@dataclass(frozen=True, slots=True)
class _Family:
    """The edits of a feature: nodes, and paths to mount if any node exists."""

    nodes: tuple[_Nodes, ...]
    mounts: tuple[str, ...] = ()


FAMILIES: Final = {
    Feature.GDS: _Family(
        (_Nodes("/dev", "nvidia-fs", "nvidia-fs"),), ("/run/udev", "/etc/cufile.json")
    ),
    Feature.MOFED: _Family(
        (
            _Nodes("/dev/infiniband", "uverbs", "infiniband_verbs"),
            _Nodes("/dev/infiniband", "rdma_cm", "rdma_cm", numbered=False, misc=True),
        )
    ),
    Feature.GDRCOPY: _Family((_Nodes("/dev", "gdrdrv", "gdrdrv", numbered=False),)),
    Feature.NVSWITCH: _Family(
        (
            _Nodes("/dev", "nvidia-nvswitchctl", "nvidia-nvswitch", numbered=False, minor=255),
            _Nodes("/dev", "nvidia-nvswitch", "nvidia-nvswitch"),
        )
    ),
}
_MIG: Final = {Feature.MIG_CONFIG: "config", Feature.MIG_MONITOR: "monitor"}

_NOT_MANAGED: Final = ("nvidia-fs", "nvidia-nvswitch", "nvidia-nvlink")
_OF_THE_DRIVER: Final = ("/dev", "/dev/nvidia-caps", IMEX_DIRECTORY)


def find_mount(path: str, roots: Iterable[str]) -> str | None:
    """Return the host path to mount at a path for a feature; None if no root has it.

    Args:
        roots: where to search, in order. A driver container's root has no udev, so the host's is
            used.
    """
    for root in roots:
        host = Fingerprint(root).resolve(path)
        if host is not None and os.path.exists(host):
            return host
    return None


def contribute(
    request: Request,
    inventory: Inventory,
    layout: Layout,
    config: Config,
    given: Collection[str] = (),
) -> Contribution:
    """Return the edits of a container's features.

    Raises:
        ImexChannelMissing: a named channel has no usable node.
        MigCapabilityMissing: the request configures or monitors MIG, but the node has none.
    """
    look = _Look(config, dict.fromkeys((inventory.driver.root, config.host_root)))
    for feature, family in FAMILIES.items():
        if feature in request.features:
            look.add_family(feature, family)
    for feature, name in _MIG.items():
        if feature in request.features:
            look.add_mig(feature, name)
    if request.imex_channels is None:
        look.add_every_channel()
    else:
        look.add_channels(request.imex_channels)
    files = Plan()
    if Feature.MANAGEMENT in request.features:
        look.add_management(excluded_numbers(config, inventory))
        files = make_plan(Grant(MANAGEMENT_CAPABILITIES), inventory, layout)
    found = {device.path: device for device in (*files.devices, *look.devices)}
    devices = tuple(device for path, device in found.items() if path not in given)
    return Contribution(
        replace(
            files,
            devices=devices,
            mounts=(*files.mounts, *look.mounts),
            additional_gids=groups_of(devices),
            missing=(*files.missing, *look.missing),
        ),
        Bounds(
            look.majors | (inventory.nodes.majors if files.devices else frozenset()),
            (*inventory.sources, *(mount.source for mount in look.mounts)),
        ),
    )


class _Look:
    """A search of the node's devices; ``majors`` are those of the drivers searched for."""

    def __init__(self, config: Config, roots: Iterable[str]) -> None:
        self._config = config
        self._roots = tuple(roots)
        self._majors = read_majors(config)
        self.majors: frozenset[int] = frozenset()
        self.devices: list[Device] = []
        self.mounts: list[Mount] = []
        self.missing: list[Missing] = []

    def add_family(self, feature: str, family: _Family) -> None:
        before = len(self.devices)
        for nodes in family.nodes:
            self._add_nodes(feature, nodes)
        if len(self.devices) > before:
            for path in family.mounts:
                self._add_mount(feature, path)

    def _add_nodes(self, feature: str, nodes: _Nodes) -> None:
        driver, minor = nodes.driver, nodes.minor
        if nodes.misc:
            driver, minor = _MISC, _misc_minors(self._config).get(nodes.driver)
        paths = [f"{nodes.directory}/{nodes.name}"]
        if nodes.numbered:
            paths = [path for path, _ in self._numbered(nodes.directory, nodes.name)]
        elif nodes.misc and minor is None:
            self.missing.append(Missing(paths[0], (f"{self._config.proc}/misc",)))
            return
        for path in paths:
            self._add(feature, path, driver, minor)
        if not paths:
            what = f"{nodes.directory}/{nodes.name}*"
            self.missing.append(Missing(what, (self._host(nodes.directory),)))

    def _add(self, feature: str, path: str, driver: str, minor: int | None) -> None:
        node = self._look(path, driver, minor)
        if isinstance(node, Node):
            self.devices.append(device_of(node, feature))
        else:
            self.missing.append(Missing(path, (node,)))

    def _add_mount(self, feature: str, path: str) -> None:
        host = find_mount(path, self._roots)
        if host is None:
            self.missing.append(Missing(path, (path,)))
        else:
            self.mounts.append(Mount(host, path, reason=feature))

    def add_mig(self, feature: str, name: str) -> None:
        """Add the MIG capability with this name."""
        minor = cap_minors(self._config).get(name)
        if minor is None:
            node: Node | str = f"{self._config.proc}/driver/nvidia-caps/mig-minors has no {name}"
        else:
            node = self._look(cap_path(minor), CAPS[0], minor)
        if not isinstance(node, Node):
            raise MigCapabilityMissing(
                f"the capability {feature}",
                found=node,
                do="check that the node's GPUs support MIG, and create its nodes (nvidia-smi does)",
            )
        self.devices.append(device_of(node, feature))

    def add_channels(self, channels: Iterable[int]) -> None:
        """Add IMEX channels by their numbers."""
        for channel in channels:
            path = f"{IMEX_DIRECTORY}/channel{channel}"
            node: Node | str = f"channels are numbered 0 to {MOST_CHANNELS - 1}"
            if 0 <= channel < MOST_CHANNELS:
                node = self._look(path, IMEX_DRIVER, channel)
            if not isinstance(node, Node):
                raise ImexChannelMissing(
                    f"IMEX channel {channel}",
                    found=node,
                    do="make the channel on the node (nvidia-modprobe -i), or name another",
                )
            self.devices.append(device_of(node, "IMEX channel"))

    def add_every_channel(self) -> None:
        """Add every IMEX channel of the node."""
        channels = list(self._numbered(IMEX_DIRECTORY, "channel"))
        for path, channel in channels:
            self._add("IMEX channel", path, IMEX_DRIVER, channel)
        if not channels:
            self.missing.append(Missing(f"{IMEX_DIRECTORY}/channel*", (IMEX_DIRECTORY,)))

    def add_management(self, withheld: Collection[tuple[int, int]]) -> None:
        """Add every node of the driver, except those with these numbers."""
        drivers = {
            major: name
            for name, major in self._majors.items()
            if name.startswith("nvidia") and not name.startswith(_NOT_MANAGED)
        }
        self.majors |= frozenset(drivers)
        for directory in _OF_THE_DRIVER:
            for name in read_names(self._host(directory)) or ():
                path = f"{directory}/{name}"
                if directory == "/dev" and (
                    not name.startswith("nvidia") or name.startswith(_NOT_MANAGED)
                ):
                    continue
                node = look_at_node(self._config, path, drivers, None, "nvidia")
                if isinstance(node, Node) and (node.major, node.minor) not in withheld:
                    self.devices.append(device_of(node, Feature.MANAGEMENT))

    def _numbered(self, directory: str, prefix: str) -> Iterator[tuple[str, int]]:
        names = (
            name for name in read_names(self._host(directory)) or () if name.startswith(prefix)
        )
        numbers = [name.removeprefix(prefix) for name in names]
        found = sorted(int(n) for n in numbers if n.isascii() and n.isdecimal())
        return ((f"{directory}/{prefix}{number}", number) for number in found)

    def _look(self, path: str, driver: str, minor: int | None) -> Node | str:
        majors = frozenset({self._majors[driver]} if driver in self._majors else ())
        self.majors |= majors
        return look_at_node(self._config, path, majors, minor, driver)

    def _host(self, path: str) -> str:
        return self._config.dev + path.removeprefix("/dev")


def _misc_minors(config: Config) -> dict[str, int]:
    lines = (line.split() for line in (read_text(f"{config.proc}/misc") or "").splitlines())
    return {words[1]: int(words[0]) for words in lines if len(words) == 2 and words[0].isdecimal()}  # noqa: PLR2004 - number and name
