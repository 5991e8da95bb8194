"""The node as the agent last saw it."""

from __future__ import annotations

from typing import Any

from api.values import dataclass
from hooks.node.inventory import Inventory
from hooks.sharing import by_name


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """The node at one time."""

    inventory: Inventory | None = None  # None if it could not be read
    faults: tuple[str, ...] = ()  # a line each
    spec: str = ""  # the path of the CDI spec; "" if there is none
    written: bool = False  # whether the spec was written or removed this time

    @property
    def driver(self) -> str:
        """The driver's version; "" without a driver."""
        return "" if self.inventory is None else self.inventory.driver.version

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the GPUs."""
        inventory = self.inventory
        return () if inventory is None else tuple(gpu.uuid for gpu in inventory.gpus)

    @property
    def mig_devices(self) -> tuple[str, ...]:
        """UUIDs of the MIG devices."""
        inventory = self.inventory
        return () if inventory is None else tuple(each.uuid for each in inventory.mig_devices)

    @property
    def drained(self) -> dict[str, str]:
        """Since when and why GPUs and MIG devices are out of service, by UUID."""
        inventory = self.inventory
        if inventory is None:
            return {}
        whole = inventory.drained and f"with the driver, {inventory.drained}"
        devices = by_name(inventory.mig_devices, inventory.gpus).items()
        return {name: why for name, each in devices if (why := each.drained or whole)}

    def as_document(self) -> dict[str, Any]:
        """Return the document for the agent's status file and log."""
        return {
            "driver": self.driver,
            "gpus": list(self.gpus),
            "migDevices": list(self.mig_devices),
            "cdiSpec": self.spec,
            "outOfService": self.drained,
            "faults": list(self.faults),
        }
