"""The topology of a node's GPUs: what connects each pair, and by how many NVLinks.

Rules
- sysfs shows the path of each GPU below its PCI root: a common bridge is a switch, and a common
  root without a common bridge is a host bridge. NVML's answer overrides it, since only NVML knows
  when two GPUs are on one board, and what a hypervisor reports.
- Only NVML knows NVLinks, and where each link of a GPU leads. Two GPUs are connected by the links
  between them, and by as many as both have to the same switches (NVIDIA's plugin does not count
  those).
- If NVML does not answer, the topology is that of sysfs, and NVML is asked again later.
- The services of the agent share one topology, which is read again when the GPUs change. Until NVML
  has answered, it is that of sysfs.

Source: go-gpuallocator internal/links, gpuallocator/besteffort_policy.go; nvml.h,
nvmlGpuTopologyLevel_t; the kernel's Documentation/ABI/testing/sysfs-bus-pci (numa_node).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import combinations
from typing import Final

from api.errors import NvshimError, one_line
from api.values import dataclass, field
from hooks.config import Config
from hooks.node.fingerprint import read_text
from hooks.node.gpus import Gpu
from hooks.node.inventory import Inventory
from integration.nvml.query import ask_nvml

_MOST_LINKS: Final = 36
_OF_A_LINK: Final = 100
_DOMAIN_DIGITS: Final = 4
_RETRY_AFTER: Final = 60.0


class Between(IntEnum):
    """What connects two GPUs; a higher number is a better connection."""

    SYSTEM = 10  # the interconnect of two sockets
    NODE = 20  # the interconnect of the host bridges of one socket
    HOST_BRIDGE = 30
    SWITCHES = 40
    SWITCH = 50
    BOARD = 60


# nvmlGpuTopologyLevel_t
_OF_NVML: Final = {
    0: Between.BOARD,
    10: Between.SWITCH,
    20: Between.SWITCHES,
    30: Between.HOST_BRIDGE,
    40: Between.NODE,
    50: Between.SYSTEM,
}


@dataclass(frozen=True, slots=True)
class Links:
    """NVML's answer, by the PCI addresses of GPUs."""

    # how many NVLinks of each GPU lead to each place
    gpus: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    hubs: frozenset[str] = frozenset()  # the places that are switches
    # the GPU at a port of a switch, by the switch's address and the port's number
    ports: Mapping[tuple[str, int | None], str] = field(default_factory=dict)
    # what connects two GPUs, the smaller address first
    between: Mapping[tuple[str, str], Between] = field(default_factory=dict)
    failure: str = ""  # why the rest is empty; "" if NVML answered

    def count(self, one: str, other: str) -> int:
        """Return how many NVLinks connect two GPUs."""
        ours, theirs = self.gpus.get(one, {}), self.gpus.get(other, {})
        direct = max(ours.get(other, 0), theirs.get(one, 0))
        common = self.hubs.intersection(ours, theirs)
        by_switch = sum(min(ours[hub], theirs[hub]) for hub in common)
        return min(direct + by_switch, _MOST_LINKS)


@dataclass(frozen=True, slots=True)
class Topology:
    """What connects the GPUs of a node, by UUID."""

    # what connects two GPUs; each pair once, in the order of their UUIDs
    nearness: Mapping[tuple[str, str], Between] = field(default_factory=dict)
    # how many NVLinks connect them, in the same order; pairs without any are left out
    nvlinks: Mapping[tuple[str, str], int] = field(default_factory=dict)
    # the GPU at a port of an NVSwitch, by the switch's PCI address and the port's number
    ports: Mapping[tuple[str, int | None], str] = field(default_factory=dict)
    failure: str = ""  # why NVML's answer is missing; "" if it is not

    def score(self, one: str, other: str) -> int:
        """Return how well two GPUs are connected; 0 if that is unknown."""
        pair = (one, other) if one < other else (other, one)
        return self.nearness.get(pair, 0) + _OF_A_LINK * self.nvlinks.get(pair, 0)


class Topologies:
    """Reads the topology, and caches it until the GPUs change. Thread-safe.

    Args:
        config: locates sysfs and the driver.
        ask_nvml: returns the child's answer, or None; by default it runs the child.
    """

    def __init__(self, config: Config, ask_nvml: Callable[[], bytes | None] | None = None) -> None:
        self._config = config
        self._ask = ask_nvml or self._run
        self._asking = threading.Lock()
        # The GPUs, and their topology.
        self._known: tuple[object, Topology] = (None, Topology())
        self._found = 0.0

    def find(self, inventory: Inventory) -> Topology:
        """Return the topology. This may take as long as NVML does, so call it in a thread."""
        with self._asking:
            key, (known_key, known) = _key_of(inventory), self._known
            is_doubtful = known.failure and time.monotonic() - self._found > _RETRY_AFTER
            if key != known_key or is_doubtful:
                links = self._links(inventory.gpus)
                known = topology_of(self._config, inventory.gpus, links)
                self._known, self._found = (key, known), time.monotonic()
        return known

    def at_once(self, inventory: Inventory) -> Topology:
        """Return what is known now, without asking NVML."""
        key, known = self._known
        if _key_of(inventory) != key:
            links = Links(failure="NVML has not answered yet")
            known = topology_of(self._config, inventory.gpus, links)
        return known

    def _links(self, gpus: Sequence[Gpu]) -> Links:
        if len(gpus) < 2:  # noqa: PLR2004 - a link needs two
            return Links()
        answer = self._ask()
        if answer is None:
            return Links(failure="NVML did not answer in time")
        return parse_links(answer)

    def _run(self) -> bytes | None:
        try:
            return ask_nvml(self._config, "links")
        except NvshimError as error:
            return json.dumps({"error": str(error)}).encode()


def _key_of(inventory: Inventory) -> object:
    """Return a value that changes with the GPUs."""
    gpus = tuple((gpu.uuid, gpu.bus_id, gpu.lost) for gpu in inventory.gpus)
    return inventory.driver.version, gpus


def topology_of(config: Config, gpus: Iterable[Gpu], links: Links) -> Topology:
    """Combine sysfs and NVML's answer."""
    there = [gpu for gpu in gpus if gpu.uuid]
    numa = numa_nodes(config, there)
    paths = {gpu.bus_id: _path(config, gpu.bus_id) for gpu in there}
    nearness: dict[tuple[str, str], Between] = {}
    nvlinks: dict[tuple[str, str], int] = {}
    for one, other in combinations(sorted(there, key=lambda gpu: gpu.uuid), 2):
        pair = (one.uuid, other.uuid)
        buses = (min(one.bus_id, other.bus_id), max(one.bus_id, other.bus_id))
        nearness[pair] = links.between.get(buses) or between(
            paths[one.bus_id], paths[other.bus_id], numa.get(one.bus_id), numa.get(other.bus_id)
        )
        if count := links.count(one.bus_id, other.bus_id):
            nvlinks[pair] = count
    uuids = {gpu.bus_id: gpu.uuid for gpu in there}
    ports = {port: uuids[at] for port, at in links.ports.items() if at in uuids}
    return Topology(nearness, nvlinks, ports, links.failure)


# -- sysfs -------------------------------------------------------------------------------------


def numa_nodes(config: Config, gpus: Iterable[Gpu]) -> dict[str, int]:
    """Return the NUMA node of each GPU, by PCI address; GPUs without one are left out."""
    found: dict[str, int] = {}
    for gpu in gpus:
        text = read_text(f"{config.sys}/bus/pci/devices/{gpu.bus_id}/numa_node") or ""
        if text.strip().isdecimal():
            found[gpu.bus_id] = int(text)
    return found


def pci_root(config: Config, bus_id: str) -> str:
    """Return the PCI root of a device ("pci0000:00"); "" if sysfs does not have it."""
    path = _path(config, bus_id)
    return path[0] if path else ""


def _path(config: Config, bus_id: str) -> tuple[str, ...]:
    """Return the PCI root of a device, the bridges to it, and itself; () without the device."""
    real = os.path.realpath(f"{config.sys}/bus/pci/devices/{bus_id}")
    words = real.split("/")
    roots = [number for number, word in enumerate(words) if word.startswith("pci")]
    return tuple(words[roots[-1] :]) if roots and words[-1] == bus_id else ()


def between(
    one: Sequence[str], other: Sequence[str], one_numa: int | None, other_numa: int | None
) -> Between:
    """Return what connects two devices.

    Args:
        one: the path of one: the PCI root, the bridges, and the device; empty if unknown.
        other: the path of the other.
        one_numa: the NUMA node of one; None if unknown.
        other_numa: the NUMA node of the other.
    """
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    if common == 0:
        return Between.NODE if one_numa == other_numa else Between.SYSTEM
    if common == 1:
        return Between.HOST_BRIDGE
    # Each is below a port of the common switch; more bridges are more switches.
    further = max(len(one), len(other)) - common - 1
    return Between.SWITCH if further <= 1 else Between.SWITCHES


# -- NVML --------------------------------------------------------------------------------------


def parse_links(answer: bytes) -> Links:
    """Parse the child's answer to "links" (:mod:`integration.nvml.child_query`)."""
    try:
        report = json.loads(answer)
    except ValueError:  # it printed nothing, or was killed
        return Links(failure="NVML crashed, or took longer than nvml-timeout")
    if "error" in report:
        return Links(failure=one_line(report["error"]))
    addresses = [_address(entry["bus_id"]) for entry in report["gpus"]]
    gpus: dict[str, dict[str, int]] = {}
    hubs: set[str] = set()
    ports: dict[tuple[str, int | None], str] = {}
    for address, entry in zip(addresses, report["gpus"], strict=True):
        to = gpus[address] = {}
        for remote, kind, port in entry["links"]:
            place = _address(remote)
            to[place] = to.get(place, 0) + 1
            # Not every driver reports the type; then a place that is not a GPU here is a switch.
            if kind == _SWITCH or (kind is None and place not in addresses):
                hubs.add(place)
                if port is not None:
                    ports[place, port] = address
    levels = {
        (min(pair), max(pair)): _OF_NVML[level]
        for first, second, level in report["between"]
        if (pair := (addresses[first], addresses[second])) and level in _OF_NVML
    }
    return Links(gpus, frozenset(hubs), ports, levels)


_SWITCH: Final = 2  # nvmlIntNvLinkDeviceType_t


def _address(text: str) -> str:
    """Return an address as sysfs writes it: the domain with four digits or more, NVML has eight.

    A text that is not an address is returned as it is, since a link may lead to a device without
    one.
    """
    domain, _, rest = text.lower().partition(":")
    try:
        return f"{int(domain, 16):0{_DOMAIN_DIGITS}x}:{rest}"
    except ValueError:
        return text
