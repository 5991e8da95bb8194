"""The node's inventory for programs other than the shim, kept for the next container as well."""

from __future__ import annotations

from hooks.config import Config
from hooks.node.inventory import Inventory, load_inventory, survey, take_inventory
from integration.nvml.lock import is_exclusive
from integration.nvml.query import probe

__all__ = ["inventory_of", "look_at_node"]


def inventory_of(config: Config, *, confirmed: bool = False, fresh: bool = False) -> Inventory:
    """Return the cached inventory if it is still valid, otherwise a new one confirmed by NVML.

    Args:
        config: locates the node's devices and the driver.
        confirmed: use the cached one only if NVML has confirmed it and no GPU was lost at that
            time, since a lost GPU may be back. While NVML has to stay closed, as during a reset,
            use it anyway.
        fresh: do not use the cached one, because a GPU may have been lost since, which only NVML
            knows.

    Returns:
        The inventory. It is cached, so that the next container does not have to query NVML.

    Raises:
        DriverNotFound: there is no driver below the driver root.
        DriverMismatch: the driver's files do not match the loaded kernel module's version.
    """
    kept = None if fresh else load_inventory(config)
    if kept is not None and not (
        confirmed and _is_doubtful(kept) and not is_exclusive(config.state)
    ):
        return kept
    return take_inventory(config, probe(config))


def _is_doubtful(kept: Inventory) -> bool:
    return bool(kept.nvml_failure) or any(gpu.lost for gpu in kept.gpus)


def look_at_node(config: Config, *, nvml: bool = True) -> Inventory:
    """Return the inventory for a command that only reads, and cache nothing.

    Args:
        config: locates the node's devices and the driver.
        nvml: query NVML if no cached inventory is valid. Otherwise use procfs, which does not know
            MIG devices.

    Raises:
        DriverNotFound: there is no driver below the driver root.
        DriverMismatch: the driver's files do not match the loaded kernel module's version.
    """
    if not nvml:
        return survey(config)
    return survey(config, lambda: probe(config))
