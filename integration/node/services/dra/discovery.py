"""What the node has for claims, as it is now: the look's inventory, and what NVML says besides.

Rules
- NVML is asked in a child that lives for one question, and only if the GPUs or their MIG devices
  may be others. Without an answer what was known of the same GPUs is known still.
- Nobody asks NVML while it is to be let go of. One that fails is asked again after a while.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from api.errors import NvshimError
from integration.detached import run_detached
from integration.node.services.dra import cdi
from integration.node.services.dra.devices import Place, devices_of
from integration.node.services.dra.mig_layout import Parts, parse_parts
from integration.node.services.dra.sharing import with_shares
from integration.nvml.query import ask_nvml
from integration.nvml.topology import numa_nodes, pci_root

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hooks.node.inventory import Inventory
    from integration.node.service import Context
    from integration.node.services.dra.devices import Device
    from integration.node.services.dra.mig_layout import Part

__all__ = ["Found", "Looking"]

_RETRY_AFTER: Final = 30.0


@dataclass(frozen=True, slots=True)
class Found:
    """What claims may have."""

    devices: Mapping[str, Device]  # by their names
    # what the CDI specs of those that are there are made of; None for nothing
    specs: cdi.Template | None
    parts: Parts  # what NVML says of GPUs in MIG mode


class Looking:
    """Looks, and keeps what NVML has said."""

    def __init__(self, context: Context, fault: Callable[[str, str], None]) -> None:
        self._context = context
        self._fault = fault
        self._parts = Parts()
        self._newest: Inventory | None = None
        self._seen: Any = None
        self._cut: Any = None
        self._failed = -math.inf

    async def look(
        self,
        inventory: Inventory | None,
        made: Mapping[Part, str],
        newest: Inventory | None = None,
        switched: frozenset[str] = frozenset(),
    ) -> Found | None:
        """What the node has.

        Args:
            inventory: what the look has found.
            made: what was made for claims, or is being made: its UUID, "" if it has none yet.
            switched: UUIDs of the GPUs that are in MIG mode for claims.
            newest: what the node has by now, since something was made or undone: NVML is asked.

        Returns:
            None if nothing may be others than before, or that is not known.
        """
        self._newest, anew = newest or self._newest, newest is not None
        inventory = self._later(inventory, made)
        if inventory is not None and inventory.nvml_failure:
            return None
        seen = (inventory, dict(made), switched)
        is_due = inventory is not None and self._is_due(inventory, anew=anew)
        if seen == self._seen and not is_due:
            return None
        if inventory is None:
            self._seen = seen
            return Found({}, None, Parts())
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
            gpu.bus_id: Place(
                numa.get(gpu.bus_id), pci_root(config, gpu.bus_id),
                peers.get(gpu.uuid, ()), _group(gpu.uuid, inventory, peers),
            )
            for gpu in inventory.gpus
        }  # fmt: skip
        every = devices_of(
            inventory, places, self._parts, made, on_demand=options.dra_mig,
            # What takes from counters has no shares: a GPU that is to have some is not cut.
            switches=options.dra_mig and not options.dra_shares, switched=switched,
        )  # fmt: skip
        found = with_shares(every, options.dra_shares, inventory, config)
        there = {gpu.uuid for gpu in inventory.gpus if not gpu.mig}
        there |= {mig.uuid for mig in inventory.mig_devices}
        specs = cdi.generate(
            options.dra_driver, (each for each in found if each.uuid in there), inventory, config
        )
        return Found({device.name: device for device in found}, specs, self._parts)

    def _later(self, inventory: Inventory | None, made: Mapping[Part, str]) -> Inventory | None:
        """What is true of what the look has found, and what was found for us.

        A look that had begun before something was made may end after that, without it.
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
        """Whether NVML is to be asked now."""
        if self._context.state.nvml_pause.value:
            return False
        is_soon = time.monotonic() - self._failed < _RETRY_AFTER
        return anew or (_cut(inventory) != self._cut and not is_soon)

    async def _ask(self, inventory: Inventory) -> None:
        """Know what NVML says of the GPUs, if it answers."""
        parts = await run_detached(self._ask_nvml)
        is_same = self._cut is not None and _cut(inventory)[0] == self._cut[0]
        if not parts.failure or not is_same:
            self._parts = parts
        if parts.failure:
            self._failed = time.monotonic()
        else:
            self._cut = _cut(inventory)
        self._fault("parts", parts.failure and f"NVML tells nothing of MIG: {parts.failure}")

    def _ask_nvml(self) -> Parts:
        try:
            return parse_parts(ask_nvml(self._context.config, "parts"))
        except NvshimError as error:
            return parse_parts(json.dumps({"error": str(error)}).encode())


def _cut(inventory: Inventory) -> tuple[Any, Any]:
    """When this is another, NVML may have other things to say."""
    gpus = tuple((gpu.uuid, gpu.mig, gpu.lost) for gpu in inventory.gpus)
    return (inventory.driver.version, gpus), tuple(mig.uuid for mig in inventory.mig_devices)


def _peers(
    inventory: Inventory, nvlinks: Mapping[tuple[str, str], int]
) -> dict[str, tuple[int, ...]]:
    """The indices of the GPUs to which each has NVLinks, by its UUID."""
    index = {gpu.uuid: gpu.index for gpu in inventory.gpus}
    found: dict[str, set[int]] = {}
    for one, other in nvlinks:
        if one in index and other in index:
            found.setdefault(one, set()).add(index[other])
            found.setdefault(other, set()).add(index[one])
    return {uuid: tuple(sorted(peers)) for uuid, peers in found.items()}


def _group(uuid: str, inventory: Inventory, peers: Mapping[str, tuple[int, ...]]) -> int | None:
    """The least index of the GPUs that NVLinks connect a GPU with, and its own; None for none."""
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
