"""Refuse devices that are out of service; the rules are in :mod:`hooks.node.drained`.

:func:`hooks.edits.grant.decide` refuses most of them, using its inventory. The two checks here
happen before any part of the driver is loaded, and after the container's bundle shows others that
it holds a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hooks.config import Config
from hooks.node.drained import driver_of, driver_refusal, mark_drained, read_drains, refusal
from hooks.node.inventory import Inventory
from hooks.requests.places import NODES
from hooks.sharing import by_name, held_by_nodes, held_by_record

__all__ = ["refuse_driver", "refuse_held"]


def refuse_driver(config: Config, asked: str = "") -> None:
    """Refuse a container if the driver is out of service, before loading any part of the driver.

    Args:
        asked: the words of the request; "" if there are none.

    Raises:
        OutOfService: the driver is out of service.
    """
    if why := driver_of(read_drains(config)):
        raise driver_refusal(asked, why)


def refuse_held(
    record: Mapping[str, Any],
    listed: Sequence[str],
    config: Config,
    find_inventory: Callable[[], Inventory],
) -> None:
    """Refuse a container if something that it would get was taken out of service meanwhile.

    Args:
        record: the record of its injection; empty for none.
        listed: the paths of the device nodes that its spec listed before the injection.
        find_inventory: returns what the node has; called only if something is out of service.

    Raises:
        OutOfService: it would get something that is out of service; the error names the first.
        InventoryError: it cannot be determined what the node has.
    """
    drains = read_drains(config)
    if not drains:
        return
    given = [node["path"] for node in record.get("edits", {}).get("devices", ())]
    nodes = [path for path in (*listed, *given) if path.startswith(NODES)]
    if not nodes and not record.get("grant"):
        return
    if why := driver_of(drains):
        raise driver_refusal(record.get("request", {}).get("source", ""), why)
    inventory = find_inventory()
    held = held_by_nodes(nodes, inventory) | held_by_record(record, inventory)
    # That inventory may be older than the marks.
    gpus, mig_devices = mark_drained(inventory.gpus, inventory.mig_devices, drains)
    for name, device in by_name(mig_devices, gpus).items():
        if device.drained and name in held:
            raise refusal(device)
