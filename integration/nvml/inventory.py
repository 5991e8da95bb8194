"""The node's inventory for programs other than the shim, kept for the next container as well."""

from __future__ import annotations

from hooks.config import Config
from hooks.node.inventory import Inventory, load_inventory, survey, take_inventory
from integration.nvml.lock import is_exclusive
from integration.nvml.query import probe

__all__ = ["inventory_of", "look_at_node"]


def inventory_of(config: Config, *, confirmed: bool = False, fresh: bool = False) -> Inventory:
    """Return the kept inventory if it is still true, otherwise a new one that NVML confirms.

    Args:
        config: where to look.
        confirmed: use the kept one only if NVML has confirmed it and no GPU was lost then, which
            may be back; while NVML has to stay closed, as during a reset, use it all the same.
        fresh: do not use the kept one: a GPU may be lost since, which only NVML knows.

    Returns:
        The inventory. It is kept, so that the next container does not have to ask.

    Raises:
        DriverNotFound: there is no driver below the driver root.
        DriverMismatch: its files are not of the loaded kernel module's version.
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
    """Return the inventory for a command that only looks, and keeps nothing.

    Args:
        config: where to look.
        nvml: ask NVML if no kept inventory is still true; otherwise use procfs, which knows no MIG
            devices.

    Raises:
        DriverNotFound: there is no driver below the driver root.
        DriverMismatch: its files are not of the loaded kernel module's version.
    """
    if not nvml:
        return survey(config)
    return survey(config, lambda: probe(config))
