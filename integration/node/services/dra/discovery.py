"""Discover the devices that claims may have, from the inventory and from NVML.

Rules
- If the GPUs or their MIG devices may have changed, a child process asks NVML one question and
  exits. If NVML does not answer, the last answer about the same GPUs is used.
- While NVML is paused, it is not asked. After a failure, or an answer that lacks a GPU that is not
  lost, the next question waits for a while.
- Values that can change at any time (the NVLink fabric, a pending repair) come from the monitor's
  samples. If a sample lacks a GPU, its values from the last sample are kept.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import anyio

from api.errors import NvshimError
from hooks.node.inventory import Inventory
from integration.detached import run_detached
from integration.node.service import Context
from integration.node.services.dra import cdi
from integration.node.services.dra.devices import Device, GpuLocation, devices_of
from integration.node.services.dra.mig_layout import Part
from integration.node.services.dra.sharing import with_shares
from integration.nvml.mig_parts import Parts, parse_parts
from integration.nvml.query import ask_nvml
from integration.nvml.topology import numa_nodes, pci_root
from integration.nvml.values import Fabric, Sample

__all__ = ["DeviceDiscovery", "NodeDevices"]

_RETRY_AFTER: Final = 30.0


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """The devices that claims may have."""

    devices: Mapping[str, Device]  # by their names
    specs: cdi.SpecTemplate | None  # for the CDI specs of existing devices; None without such
    parts: Parts  # NVML's answer about GPUs in MIG mode


class DeviceDiscovery:
    """Discovers devices, and keeps the last result and NVML's last answer.

    Attributes:
        latest: the last result; None before the first one.
        known: set once a result contains a usable device.
    """

    def __init__(self, context: Context, fault: Callable[[str, str], None]) -> None:
        self._context = context
        self._fault = fault
        self.latest: NodeDevices | None = None
        self.known = anyio.Event()
        self._parts = Parts()
        self._newest: Inventory | None = None
        self._seen: Any = None
        self._cut: Any = None
        self._is_partial = False  # whether NVML's last answer lacks a GPU
        self._failed = -math.inf
        self._sampled: dict[str, tuple[Fabric | None, bool]] = {}

    @property
    def devices(self) -> Mapping[str, Device] | None:
        """The devices by their names; None before the first result."""
        return None if self.latest is None else self.latest.devices

    @property
    def template(self) -> cdi.SpecTemplate | None:
        """The template for CDI specs; None if no device exists."""
        return None if self.latest is None else self.latest.specs

    async def discover(
        self,
        inventory: Inventory | None,
        made: Mapping[Part, str],
        newest: Inventory | None = None,
        switched: frozenset[str] = frozenset(),
    ) -> NodeDevices | None:
        """Discover the devices of the node.

        Args:
            inventory: the agent's last inventory.
            made: the UUIDs of MIG devices that the driver created; "" while one is being created.
            switched: the UUIDs of GPUs that the driver switched to MIG mode.
            newest: a newer inventory, after MIG devices were created or deleted; NVML is then asked
                again.

        Returns:
            The devices; None if nothing has changed, or nothing is known.
        """
        found = await self._discover(inventory, made, newest, switched)
        if found is not None:
            self.latest = found
            if found.specs is not None:
                self.known.set()
        return found

    async def _discover(
        self,
        inventory: Inventory | None,
        made: Mapping[Part, str],
        newest: Inventory | None,
        switched: frozenset[str],
    ) -> NodeDevices | None:
        self._newest, anew = newest or self._newest, newest is not None
        inventory = self._later(inventory, made)
        if inventory is not None and inventory.nvml_failure:
            return None
        self._sampled |= _sampled(self._context.state.sample.value)
        seen = (inventory, dict(made), switched, dict(self._sampled))
        is_due = inventory is not None and self._is_due(inventory, anew=anew)
        if seen == self._seen and not is_due:
            return None
        if inventory is None:
            self._seen = seen
            return NodeDevices({}, None, Parts())
        config, options = self._context.config, self._context.options
        if is_due:
            await self._ask(inventory)
        topologies = self._context.topologies
        topology = topologies.at_once(inventory)
        if not self._context.state.nvml_pause.value:
            topology = await run_detached(topologies.find, inventory)
        self._seen = seen
        peers = _peers(inventory, topology.nvlinks)
        numa = numa_nodes(config, inventory.gpus)
        places = {
            gpu.bus_id: GpuLocation(
                numa.get(gpu.bus_id), pci_root(config, gpu.bus_id),
                peers.get(gpu.uuid, ()), _group(gpu.uuid, inventory, peers),
                *self._sampled.get(gpu.uuid, ()),
            )
            for gpu in inventory.gpus
        }  # fmt: skip
        every = devices_of(
            inventory, places, self._parts, made, on_demand=options.dra_mig,
            # A device that consumes counters has no shares. So GPUs with shares are not divided.
            switches=options.dra_mig and not options.dra_shares, switched=switched,
        )  # fmt: skip
        found = with_shares(every, options.dra_shares, inventory, config)
        there = {gpu.uuid for gpu in inventory.gpus if not gpu.mig}
        there |= {mig.uuid for mig in inventory.mig_devices}
        specs = cdi.generate(
            options.dra_driver, (each for each in found if each.uuid in there), inventory, config
        )
        return NodeDevices({device.name: device for device in found}, specs, self._parts)

    def _later(self, inventory: Inventory | None, made: Mapping[Part, str]) -> Inventory | None:
        """Return the inventory to use: the agent's, or a newer one from this driver.

        An inventory that was started before a MIG device was created may finish later, without the
        device.
        """
        newest = self._newest
        if inventory is None or newest is None:
            return inventory
        there = {mig.uuid for mig in newest.mig_devices} - {
            mig.uuid for mig in inventory.mig_devices
        }
        later = inventory.taken - newest.taken
        is_behind = later < self._context.config.nvml_timeout + 1
        if later < 0 or (is_behind and there.intersection(made.values())):
            return newest
        return inventory

    def _is_due(self, inventory: Inventory, *, anew: bool) -> bool:
        """Return whether to ask NVML now."""
        if self._context.state.nvml_pause.value:
            return False
        is_soon = time.monotonic() - self._failed < _RETRY_AFTER
        is_new = self._is_partial or _cut(inventory) != self._cut
        return anew or (is_new and not is_soon)

    async def _ask(self, inventory: Inventory) -> None:
        """Ask NVML how GPUs are cut, and keep the answer if there is one."""
        parts = await run_detached(self._ask_nvml)
        is_same = self._cut is not None and _cut(inventory)[0] == self._cut[0]
        if not parts.failure or not is_same:
            self._parts = parts
        out = parts.left_out(inventory.gpus)
        self._is_partial = bool(out) and not parts.failure
        why = parts.failure or (out and f"its answer lacks {out}")
        if why:
            self._failed = time.monotonic()
        if not parts.failure:
            self._cut = _cut(inventory)
        self._fault("parts", why and f"NVML does not report MIG: {why}")

    def _ask_nvml(self) -> Parts:
        try:
            return parse_parts(ask_nvml(self._context.config, "parts"))
        except NvshimError as error:
            return parse_parts(json.dumps({"error": str(error)}).encode())


def _sampled(sample: Sample | None) -> dict[str, tuple[Fabric | None, bool]]:
    """Return the fabric of each GPU, and whether a repair waits for its reset, by UUID."""
    return {
        gpu.uuid: (
            gpu.fabric,
            any((gpu.rows_pending, gpu.channel_repair_pending, gpu.tpc_repair_pending)),
        )
        for gpu in (sample.gpus if sample is not None else ())
        if not gpu.lost
    }


def _cut(inventory: Inventory) -> tuple[Any, Any]:
    """Return what NVML's answer depends on."""
    gpus = tuple((gpu.uuid, gpu.mig, gpu.lost) for gpu in inventory.gpus)
    return (inventory.driver.version, gpus), tuple(mig.uuid for mig in inventory.mig_devices)


def _peers(
    inventory: Inventory, nvlinks: Mapping[tuple[str, str], int]
) -> dict[str, tuple[int, ...]]:
    """Return the indices of the GPUs that each GPU has NVLinks to, by its UUID."""
    index = {gpu.uuid: gpu.index for gpu in inventory.gpus}
    found: dict[str, set[int]] = {}
    for one, other in nvlinks:
        if one in index and other in index:
            found.setdefault(one, set()).add(index[other])
            found.setdefault(other, set()).add(index[one])
    return {uuid: tuple(sorted(peers)) for uuid, peers in found.items()}


def _group(uuid: str, inventory: Inventory, peers: Mapping[str, tuple[int, ...]]) -> int | None:
    """Return the lowest index in a GPU's NVLink group, its own included; None without NVLinks."""
    if uuid not in peers:
        return None
    uuids = {gpu.index: gpu.uuid for gpu in inventory.gpus}
    reached: set[int] = set()
    ahead = set(peers[uuid])
    while ahead:
        index = ahead.pop()
        reached.add(index)
        ahead |= set(peers[uuids[index]]) - reached
    return min(reached)
