"""The node's devices as the driver publishes them for the scheduler. Pure.

====================================  ========================================================
attribute                             meaning
====================================  ========================================================
gpu.nvidia.com/type                   ``gpu`` or ``mig``
gpu.nvidia.com/uuid, productName,     of the device; ``brand``, ``architecture`` and
brand, architecture                   ``cudaComputeCapability`` if NVML knows them
gpu.nvidia.com/cudaComputeCapability  semantic versions: driver
driverVersion, cudaDriverVersion      580.65.06 is 580.65.6
gpu.nvidia.com/parentUUID, profile    of a MIG device
resource.kubernetes.io/pciBusID,      of the GPU; ``numaNode`` is standard from Kubernetes 1.37
pcieRoot, numaNode
gpu.nvidia.com/addressingMode         how a GPU accesses host memory, if NVML knows
index, minor                          of the GPU, as nvidia-smi and /dev/nvidiaN have them
nvlinkPeers                           the indices of the GPUs to which a GPU has NVLinks ("0,1,3")
nvlinkGroup                           the same number for all GPUs that NVLinks connect
health                                ``healthy``, ``suspect``, ``unhealthy`` or ``recovering``
fabricClusterUUID, fabricClique       of a whole GPU in an NVLink fabric of several machines; the
                                      clique is "CLUSTER.NUMBER", as in nvidia.com/gpu.clique
repairPending                         true of a whole GPU that a reset would repair; else missing
====================================  ========================================================

The first ones have the names, types and domain of NVIDIA's driver, whatever this driver is called,
so that selectors such as ``device.attributes['gpu.nvidia.com'].type == 'gpu'`` work with both. The
last ones, from ``index`` on, are in the domain of this driver. The capacity is
``gpu.nvidia.com/memory``. MIG devices also have the capacities in
:data:`~integration.nvml.mig_parts.CAPACITIES` and ``memorySliceN``; these names are NVIDIA's, too.

Rules
- A device's name is its UUID, so that names are never reused.
- A GPU in MIG mode is not published itself. Its MIG devices are: those that exist, and with
  ``--dra-mig`` those that the driver can create (:mod:`.mig_layout`). If the driver may switch the
  mode of a GPU, the GPU is published with all its parts, whichever mode it is in.
- A MIG device that the driver creates has the same name, attributes and capacity before, during and
  after its existence. Its name stands in for the missing UUID.
- If a device reaches the API's limit of attributes and capacities, its ``memorySliceN`` are left
  out. So is a list of peers that is too long for an attribute.
- Devices without a UUID, with an ambiguous one, or excluded by the configuration are not published.
- A device that a device plugin gave to a pod is left out until the pod ends.

A device that no new pod should get has taints while that is the case, or is left out:

=================================  ================  ===========================================
taint                              value             of a device that
=================================  ================  ===========================================
DRIVER/unhealthy                   ``xid-79``, or    is unhealthy, until it has proven that it is
                                   the reason        healthy (see device_health.device_state)
gpu.nvidia.com/xid                 ``79``            is unhealthy by an Xid; NVIDIA's driver has the
                                                     same, and DeviceTaintRules may look for it
DRIVER/lost                        ``no-answer``     does not answer, or has no device node
DRIVER/out-of-service              since when, why   an administrator took out of service
=================================  ================  ===========================================

Their effect is NoSchedule or, if configured, NoExecute, which evicts pods. A suspect device may
still be allocated to claims. Its taint has the effect None, which keeps no pod away:

=================================  ================  ===========================================
DRIVER/suspect                     the same          had an error that may come from its pod, or
                                                     NVML does not answer
DRIVER/unwatched                   the reason        delivers no events, so errors are found late
=================================  ================  ===========================================

Source: kubernetes-sigs/dra-driver-nvidia-gpu, deviceinfo.go, and the words of go-nvlib that it
publishes; Kubernetes, resource.k8s.io/v1, DeviceTaint.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from hooks.node.gpus import Gpu, MigDevice
from hooks.node.inventory import Inventory
from integration.node.device_health.device_state import Condition
from integration.node.services.dra.mig_layout import (
    Counters,
    Part,
    all_of,
    can_switch,
    capacity_of,
    possible,
)
from integration.node.values.claims import name_of, quantity
from integration.node.values.health import HealthState
from integration.nvml.mig_parts import GpuParts, Parts
from integration.nvml.values import Fabric

__all__ = [
    "EFFECTS", "INFORM", "MOST_FACTS", "NVIDIA", "SLICE", "Device", "GpuLocation", "Taint",
    "devices_of", "publishable",
]  # fmt: skip

NVIDIA: Final = "gpu.nvidia.com"
"""The domain of the attributes of NVIDIA's driver, and that driver's name."""

SLICE: Final = f"{NVIDIA}/memorySlice"
"""Prefix of the capacities that say where on its GPU a MIG device is."""

MOST_FACTS: Final = 32
"""The maximum number of attributes and capacities of a device."""

EFFECTS: Final[Mapping[str, str]] = {"taint": "NoSchedule", "evict": "NoExecute", "omit": ""}
"""The effect of taints, by the setting ``--dra-unhealthy``; "" for no taints."""

INFORM: Final = "None"
"""The effect of taints that keep no pod away; servers of Kubernetes 1.34 do not know it."""

_LONGEST_VALUE: Final = 63
_UNFIT: Final = re.compile(r"[^A-Za-z0-9._]+")

_STANDARD: Final = "resource.kubernetes.io"
_LONGEST_TEXT: Final = 64
_WORDS: Final = 3

_WORST_FIRST: Final = (HealthState.UNHEALTHY, HealthState.RECOVERING, HealthState.SUSPECT)

_BRANDS: Final = {
    "quadro": "Quadro", "tesla": "Tesla", "nvs": "NVS", "grid": "Grid", "geforce": "GeForce",
    "titan": "Titan", "nvidiartx": "NvidiaRTX", "nvidia": "Nvidia", "quadrortx": "QuadroRTX",
    "geforcertx": "GeForceRTX", "titanrtx": "TitanRTX", "nvidiavapps": "NvidiaVApps",
    "nvidiavpc": "NvidiaVPC", "nvidiavcs": "NvidiaVCS", "nvidiavws": "NvidiaVWS",
    "nvidiavgaming": "NvidiaCloudGaming", "unknown": "Unknown",
}  # fmt: skip


class Taint(NamedTuple):
    """A taint, as in the API."""

    key: str
    value: str
    effect: str  # a value of EFFECTS, or INFORM


@dataclass(frozen=True, slots=True)
class GpuLocation:
    """Where a GPU is in the machine."""

    numa: int | None = None  # its NUMA node; None if unknown
    root: str = ""  # its PCI root ("pci0000:00"); "" if unknown
    peers: tuple[int, ...] = ()  # the indices of the GPUs that it has NVLinks to
    # the lowest index in the group of GPUs that NVLinks connect, its own included
    group: int | None = None
    fabric: Fabric | None = None  # its place in an NVLink fabric, as last sampled
    needs_repair: bool = False  # whether a repair waits for a reset of it, as last sampled


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU or a MIG device that claims may have."""

    name: str  # in the API
    uuid: str  # its UUID; its name before it is created
    gpu: str  # UUID of the GPU that it is, or is a part of
    # by their full names, as in the API
    attributes: Mapping[str, Mapping[str, str | int]] = field(hash=False)
    capacity: Mapping[str, str] = field(hash=False)  # quantities, by their full names
    lost: bool = False  # whether it does not answer, or has no device node
    drained: str = ""  # since when and why it is out of service; "" if it is in service
    part: Part | None = None  # its place on the GPU, if the driver creates it
    # what it consumes of its GPU, if the driver creates it or may cut the GPU instead
    counters: Counters | None = field(default=None, hash=False)
    shares: int = 0  # how many claims may share it; 0 if no number limits them
    # the memory of a claim that requests none, a quantity; "" if one claim has all of the device
    share_memory: str = ""
    taints: tuple[Taint, ...] = ()  # why no new pod should get it

    @property
    def can_be_given(self) -> bool:
        """Whether a claim may get it while it is free."""
        return not self.lost and not self.drained


def devices_of(
    inventory: Inventory,
    places: Mapping[str, GpuLocation] | None = None,
    parts: Parts | None = None,
    made: Mapping[Part, str] | None = None,
    *,
    on_demand: bool = False,
    switches: bool = False,
    switched: Collection[str] = (),
) -> tuple[Device, ...]:
    """Return the devices that claims may have, GPUs first.

    Args:
        places: the known locations of GPUs, by PCI address.
        made: the UUIDs of parts that were created for claims; "" while one is being created.
        on_demand: whether the driver creates MIG devices.
        switches: whether the driver may switch MIG mode to create them.
        switched: the UUIDs of GPUs that the driver switched to MIG mode.
    """
    node = _Node(
        inventory, places or {}, parts or Parts(), made or {}, on_demand, switches,
        frozenset(switched),
    )  # fmt: skip
    found = [*node.gpus(), *node.there(), *node.possible()]
    times = Counter(each.uuid for each in found)
    return tuple(each for each in found if each.uuid and times[each.uuid] == 1)


@dataclass(frozen=True, slots=True)
class _Node:
    """The arguments of :func:`devices_of`."""

    inventory: Inventory
    places: Mapping[str, GpuLocation]
    parts: Parts
    made: Mapping[Part, str]
    on_demand: bool
    switches: bool
    switched: frozenset[str]

    def gpus(self) -> Iterator[Device]:
        """Yield the GPUs that claims may have as a whole."""
        for gpu in self.inventory.gpus:
            is_either = self._is_either(gpu)
            if gpu.excluded or (gpu.mig and not is_either):
                continue
            place = self.places.get(gpu.bus_id, GpuLocation())
            attributes = {
                f"{NVIDIA}/type": _text("gpu"),
                f"{NVIDIA}/uuid": _text(gpu.uuid),
                **self._common(gpu),
            }
            peers = ",".join(map(str, place.peers))
            if 0 < len(peers) <= _LONGEST_TEXT:
                attributes["nvlinkPeers"] = _text(peers)
            if place.group is not None:
                attributes["nvlinkGroup"] = {"int": place.group}
            if place.fabric is not None and place.fabric.name:
                attributes["fabricClusterUUID"] = _text(place.fabric.cluster_uuid)
                attributes["fabricClique"] = _text(place.fabric.name)
            if place.needs_repair:
                attributes["repairPending"] = {"bool": True}
            memory = {f"{NVIDIA}/memory": quantity(gpu.memory)} if gpu.memory else {}
            counters = all_of(gpu.minor, self.parts.gpus[gpu.uuid]) if is_either else None
            yield Device(
                name_of(gpu.uuid), gpu.uuid, gpu.uuid, attributes, memory, self._is_lost(gpu),
                self._drained(gpu), None, counters,
            )  # fmt: skip

    def there(self) -> Iterator[Device]:
        """Yield the MIG devices that exist and were not created for claims."""
        ours = {(part.gpu, part.profile, part.start) for part in self.made}
        by_index = {gpu.index: gpu for gpu in self.inventory.gpus}
        for mig in self.inventory.mig_devices:
            gpu = by_index.get(mig.gpu)
            if gpu is None or gpu.excluded or not gpu.uuid or mig.uuid in self.made.values():
                continue
            instance = self.parts.instance(mig.uuid)
            if instance is None and (self.on_demand or self.made):
                continue  # the driver may be creating or deleting it
            if instance and (gpu.uuid, instance.profile, instance.start) in ours:
                continue
            attributes = {f"{NVIDIA}/uuid": _text(mig.uuid), **self._of_part(mig.profile, gpu)}
            capacity = _capacity(self.parts.figures.get(mig.uuid, ()))
            slices = range(instance.start, instance.start + instance.size) if instance else range(0)
            # Less than the limit, because health will be one more attribute.
            if len(attributes) + len(capacity) + len(slices) < MOST_FACTS:
                capacity |= {f"{SLICE}{n}": "1" for n in slices}
            yield Device(
                name_of(mig.uuid), mig.uuid, gpu.uuid, attributes, capacity, self._is_lost(gpu),
                self._drained(mig),
            )  # fmt: skip

    def possible(self) -> Iterator[Device]:
        """Yield the MIG devices that the driver created, or can create."""
        by_name = {part.name: uuid for part, uuid in self.made.items()}
        there = {mig.uuid: mig for mig in self.inventory.mig_devices}
        for gpu in self.inventory.gpus:
            cut = self.parts.gpus.get(gpu.uuid)
            if gpu.excluded or cut is None or not (gpu.mig or self._is_either(gpu)):
                continue
            for part, profile, counters in possible(gpu.uuid, gpu.minor, cut, self.made):
                name = part.name
                if self.on_demand or name in by_name:
                    uuid = by_name.get(name) or name
                    yield Device(
                        name, uuid, gpu.uuid, self._of_part(profile.name, gpu),
                        _capacity(profile.figures), self._is_lost(gpu),
                        # An administrator drains an existing device by its own UUID.
                        self._drained(there.get(uuid, gpu)), part, counters,
                    )  # fmt: skip

    def _is_either(self, gpu: Gpu) -> bool:
        """Return whether claims may have a GPU either as a whole or in parts."""
        cut = self.parts.gpus.get(gpu.uuid, GpuParts())
        ours = {(part.profile, part.start) for part in self.made if part.gpu == gpu.uuid}
        if any((each.profile, each.start) not in ours for each in cut.instances):
            return False  # an administrator created instances
        if gpu.uuid in self.switched:
            return bool(cut.profiles)
        return self.switches and not gpu.mig and can_switch(gpu.compute_capability, cut)

    def _is_lost(self, gpu: Gpu) -> bool:
        return bool(gpu.lost) or gpu.path not in self.inventory.nodes.usable

    def _drained(self, device: Gpu | MigDevice) -> str:
        return device.drained or self.inventory.drained

    def _of_part(self, profile: str, gpu: Gpu) -> dict[str, Mapping[str, str | int]]:
        """Return the attributes of a MIG device, whether it exists or not."""
        return {
            f"{NVIDIA}/type": _text("mig"),
            f"{NVIDIA}/parentUUID": _text(gpu.uuid),
            **({f"{NVIDIA}/profile": _text(profile)} if profile else {}),
            **self._common(gpu),
        }

    def _common(self, gpu: Gpu) -> dict[str, Mapping[str, str | int]]:
        """Return the attributes of the GPU, which its MIG devices have, too."""
        place = self.places.get(gpu.bus_id, GpuLocation())
        texts = {
            f"{NVIDIA}/brand": _BRANDS.get(gpu.brand, ""),
            f"{NVIDIA}/architecture": gpu.architecture,
            f"{NVIDIA}/addressingMode": self.parts.addressing.get(gpu.uuid, ""),
            f"{_STANDARD}/pcieRoot": place.root,
        }
        versions = {
            "cudaComputeCapability": gpu.compute_capability,
            "cudaDriverVersion": self.inventory.cuda_version,
            "driverVersion": self.inventory.driver.version,
        }
        parsed = {name: semantic_version(text) for name, text in versions.items()}
        return {
            f"{NVIDIA}/productName": _text(gpu.model),
            f"{_STANDARD}/pciBusID": _text(gpu.bus_id),
            "index": {"int": gpu.index},
            "minor": {"int": gpu.minor},
            **{name: _text(text) for name, text in texts.items() if text},
            **{f"{NVIDIA}/{name}": {"version": each} for name, each in parsed.items() if each},
            **({} if place.numa is None else {f"{_STANDARD}/numaNode": {"int": place.numa}}),
        }


def _taints_of(
    conditions: Sequence[Condition],
    driver: str,
    effect: str,
    *,
    lost: bool = False,
    drained: str = "",
) -> tuple[Taint, ...]:
    """Return why no new pod should get a device, or what else is wrong with it.

    Args:
        conditions: the health of the device and of its GPU.
        lost: whether the device does not answer, or has no device node.
        drained: since when and why the device is out of service; "" if it is in service.
    """
    bad = next((each for each in conditions if not each.state.is_allocatable), None)
    why = {}
    if bad is not None:
        why[f"{driver}/unhealthy"] = _cause(bad)
        if bad.xid:
            why[f"{NVIDIA}/xid"] = str(bad.xid)
    if lost:
        why[f"{driver}/lost"] = "no-answer"
    if drained:
        why[f"{driver}/out-of-service"] = drained
    hints = {}
    for each in conditions:
        if each.unwatched:
            hints[f"{driver}/unwatched"] = each.unwatched
        elif each.state is HealthState.SUSPECT:
            hints[f"{driver}/suspect"] = _cause(each)
    return (
        *(Taint(key, _value(text), effect) for key, text in why.items()),
        *(Taint(key, _value(text), INFORM) for key, text in hints.items() if effect),
    )


def _cause(condition: Condition) -> str:
    return f"xid-{condition.xid}" if condition.xid else condition.reason


def _value(text: str) -> str:
    """Return a text as a valid label value."""
    return _UNFIT.sub("-", text)[:_LONGEST_VALUE].strip("-._")


def publishable(
    devices: Iterable[Device],
    health: Mapping[str, Condition],
    plugin_gave: Collection[str] = (),
    driver: str = "",
    effect: str = "",
) -> tuple[Device, ...]:
    """Return the devices to publish, with their health and taints.

    Args:
        health: the health by UUID; a device that is missing here is healthy.
        plugin_gave: the UUIDs of devices that device plugins gave to pods.
        effect: the effect of the taints of unusable devices; "" to leave these devices out.
    """
    found = []
    for device in devices:
        known = [health[uuid] for uuid in (device.uuid, device.gpu) if uuid in health]
        taints = _taints_of(known, driver, effect, lost=device.lost, drained=device.drained)
        if (effect or not taints) and not {device.uuid, device.gpu}.intersection(plugin_gave):
            states = {condition.state for condition in known}
            word = next((state for state in _WORST_FIRST if state in states), HealthState.HEALTHY)
            attributes = {**device.attributes, "health": _text(word.value)}
            found.append(replace(device, attributes=attributes, taints=taints))
    return tuple(found)


def _capacity(figures: Iterable[int]) -> dict[str, str]:
    named = capacity_of(figures) if figures else {}
    return {f"{NVIDIA}/{name}": value for name, value in named.items()}


def semantic_version(text: str) -> str:
    """Return a semantic version ("580.65.06" → "580.65.6"); "" if the text is not a version."""
    words = text.split(".")
    if not all(word.isascii() and word.isdecimal() for word in words) or len(words) > _WORDS:
        return ""
    return ".".join(str(int(word)) for word in [*words, "0", "0"][:_WORDS])


def _text(text: str) -> Mapping[str, str | int]:
    return {"string": text[:_LONGEST_TEXT]}
