"""How near the GPUs of a node are to each other: what is between them, and how many NVLinks.

Rules
- What is between two GPUs is in sysfs, in the path of each below its PCI root: a bridge that both
  are below is a switch, and no common bridge but one root is a host bridge. NVML's word comes
  before it: only NVML knows of two GPUs on one board, and what a hypervisor has told.
- NVLinks are told by NVML alone: which link of a GPU leads where. Between two GPUs there are those
  that lead from one to the other, and as many as both have to the same switches (NVIDIA's plugin
  does not count those).
- NVML is asked in a child that lives for one question, as for the inventory. Without an answer
  there is what sysfs says, and NVML is asked again later.
- It is found once for all parts of the agent, and again when there are other GPUs. Until NVML has
  answered there is what sysfs says.

Source: go-gpuallocator internal/links, gpuallocator/besteffort_policy.go; nvml.h,
nvmlGpuTopologyLevel_t; the kernel's Documentation/ABI/testing/sysfs-bus-pci (numa_node).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import combinations
from typing import Final

from api.errors import NvshimError, one_line
from hooks.config import Config
from hooks.node.fingerprint import read_text
from hooks.node.gpus import Gpu
from hooks.node.inventory import Inventory
from integration.nvml.query import ask_nvml

_MOST_LINKS: Final = 18
_OF_A_LINK: Final = 100
_DOMAIN_DIGITS: Final = 4
_RETRY_AFTER: Final = 60.0


class Between(IntEnum):
    """What is between two GPUs; the number is what that is worth."""

    SYSTEM = 10  # the interconnect of two sockets
    NODE = 20  # that of the host bridges of one socket
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
    """What NVML said; GPUs are called by their PCI addresses."""

    # of each GPU, to where how many of its NVLinks lead
    gpus: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    hubs: frozenset[str] = frozenset()  # of these places, those that are switches
    # what is between two GPUs, the smaller address first
    between: Mapping[tuple[str, str], Between] = field(default_factory=dict)
    failure: str = ""  # why there is nothing else in it; "" if NVML answered

    def count(self, one: str, other: str) -> int:
        """How many NVLinks there are between two GPUs."""
        ours, theirs = self.gpus.get(one, {}), self.gpus.get(other, {})
        direct = max(ours.get(other, 0), theirs.get(one, 0))
        common = self.hubs.intersection(ours, theirs)
        by_switch = sum(min(ours[hub], theirs[hub]) for hub in common)
        return min(direct + by_switch, _MOST_LINKS)


@dataclass(frozen=True, slots=True)
class Topology:
    """How near the GPUs of a node are to each other, by UUID."""

    # what is between two GPUs; each pair once, in order of their UUIDs
    nearness: Mapping[tuple[str, str], Between] = field(default_factory=dict)
    # how many NVLinks are between them, likewise; none is left out
    nvlinks: Mapping[tuple[str, str], int] = field(default_factory=dict)
    failure: str = ""  # why NVML's word is not in it; "" if it is

    def score(self, one: str, other: str) -> int:
        """What it is worth to have two GPUs together; 0 if nothing is known of them."""
        pair = (one, other) if one < other else (other, one)
        return self.nearness.get(pair, 0) + _OF_A_LINK * self.nvlinks.get(pair, 0)


class Topologies:
    """Finds the topology, and keeps it until there are other GPUs. For several threads.

    Args:
        config: where sysfs and the driver are.
        ask_nvml: answers as the probe does; by default it is run. None for no answer.
    """

    def __init__(self, config: Config, ask_nvml: Callable[[], bytes | None] | None = None) -> None:
        self._config = config
        self._ask = ask_nvml or self._run
        self._asking = threading.Lock()
        # What it is of, and what is known of that.
        self._known: tuple[object, Topology] = (None, Topology())
        self._found = 0.0

    def find(self, inventory: Inventory) -> Topology:
        """The topology of the node's GPUs. It may take as long as NVML may (in a thread, then)."""
        with self._asking:
            key, (known_key, known) = _key_of(inventory), self._known
            is_doubtful = known.failure and time.monotonic() - self._found > _RETRY_AFTER
            if key != known_key or is_doubtful:
                links = self._links(inventory.gpus)
                known = topology_of(self._config, inventory.gpus, links)
                self._known, self._found = (key, known), time.monotonic()
        return known

    def at_once(self, inventory: Inventory) -> Topology:
        """What is known of it now, without asking NVML."""
        key, known = self._known
        if _key_of(inventory) != key:
            links = Links(failure="NVML has not answered yet")
            known = topology_of(self._config, inventory.gpus, links)
        return known

    def _links(self, gpus: Sequence[Gpu]) -> Links:
        if len(gpus) < 2:  # noqa: PLR2004 - there is nothing between one and nobody
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
    """When this is another, there are other GPUs."""
    gpus = tuple((gpu.uuid, gpu.bus_id, gpu.lost) for gpu in inventory.gpus)
    return inventory.driver.version, gpus


def topology_of(config: Config, gpus: Iterable[Gpu], links: Links) -> Topology:
    """The topology, of sysfs and what NVML said."""
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
    return Topology(nearness, nvlinks, links.failure)


# -- sysfs -------------------------------------------------------------------------------------


def numa_nodes(config: Config, gpus: Iterable[Gpu]) -> dict[str, int]:
    """The NUMA node of each GPU, by PCI address; what the machine does not say is left out."""
    found: dict[str, int] = {}
    for gpu in gpus:
        text = read_text(f"{config.sys}/bus/pci/devices/{gpu.bus_id}/numa_node") or ""
        if text.strip().isdecimal():
            found[gpu.bus_id] = int(text)
    return found


def pci_root(config: Config, bus_id: str) -> str:
    """The PCI root of a device ("pci0000:00"); "" if the machine does not say."""
    path = _path(config, bus_id)
    return path[0] if path else ""


def _path(config: Config, bus_id: str) -> tuple[str, ...]:
    """The PCI root of a device, the bridges to it, and itself; nothing if it is not there."""
    real = os.path.realpath(f"{config.sys}/bus/pci/devices/{bus_id}")
    words = real.split("/")
    roots = [number for number, word in enumerate(words) if word.startswith("pci")]
    return tuple(words[roots[-1] :]) if roots and words[-1] == bus_id else ()


def between(
    one: Sequence[str], other: Sequence[str], one_numa: int | None, other_numa: int | None
) -> Between:
    """What is between two devices by their paths.

    A path is the PCI root, the bridges to a device, and itself; empty if that is not known. So is
    None for a NUMA node.
    """
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    if common == 0:
        return Between.NODE if one_numa == other_numa else Between.SYSTEM
    if common == 1:
        return Between.HOST_BRIDGE
    # Each is below a port of the switch that both are below: further ones are further switches.
    further = max(len(one), len(other)) - common - 1
    return Between.SWITCH if further <= 1 else Between.SWITCHES


# -- NVML --------------------------------------------------------------------------------------


def parse_links(answer: bytes) -> Links:
    """The meaning of what the child printed (:mod:`integration.nvml.query_child`)."""
    try:
        report = json.loads(answer)
    except ValueError:  # it printed nothing, or was ended in the middle
        return Links(failure="NVML crashed, or took longer than nvml-timeout")
    if "error" in report:
        return Links(failure=one_line(report["error"]))
    addresses = [_address(entry["bus_id"]) for entry in report["gpus"]]
    gpus: dict[str, dict[str, int]] = {}
    hubs: set[str] = set()
    for address, entry in zip(addresses, report["gpus"], strict=True):
        to = gpus[address] = {}
        for remote, kind in entry["links"]:
            place = _address(remote)
            to[place] = to.get(place, 0) + 1
            # Of what kind it is not every driver says; what is no GPU of ours is a switch then.
            if kind == _SWITCH or (kind is None and place not in addresses):
                hubs.add(place)
    levels = {
        (min(pair), max(pair)): _OF_NVML[level]
        for first, second, level in report["between"]
        if (pair := (addresses[first], addresses[second])) and level in _OF_NVML
    }
    return Links(gpus, frozenset(hubs), levels)


_SWITCH: Final = 2  # nvmlIntNvLinkDeviceType_t


def _address(text: str) -> str:
    """NVML writes the domain with eight digits ("00000000:07:00.0"), sysfs with four or more."""
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):0{_DOMAIN_DIGITS}x}:{rest}"
