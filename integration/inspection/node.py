"""Describe a node: its driver, where we looked for it, and how fresh that is."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Final

from api.errors import NvshimError
from hooks import platforms
from hooks.config import Config, Platform
from hooks.node import cache
from hooks.node.fingerprint import Fingerprint, read_text
from hooks.node.host_setup import is_loaded
from hooks.node.inventory import Inventory
from hooks.node.roots import look, module_version
from integration.inspection.gpus import gpu_rows
from integration.layer_usage import layer_usage
from integration.nvml.inventory import look_at_node
from integration.tree import own_tree, read_tree
from shim import VERSION

KEPT: Final = "kept"
NVML: Final = "NVML"
PROCFS: Final = "procfs"

_CHECKOUT: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

MODULES: Final = (
    "nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm", "nvidia_peermem", "nvidia_fs",
    "nvidia_vgpu_vfio", "gdrdrv", "nouveau",
)  # fmt: skip
"""The kernel modules that matter for GPUs; the last one blocks the driver."""


def describe_node(config: Config, *, nvml: bool = True) -> dict[str, Any]:
    """Return what ``nvshim info`` shows about the node.

    Args:
        config: the configuration in use.
        nvml: whether to query NVML if no inventory is cached.

    Returns:
        Plain values; the keys are a public interface. Without a driver, ``driver`` is null and
        ``driver_error`` gives the reason.
    """
    platform = platforms.platform_of(config)
    inventory, error = None, None
    if platform == Platform.NVML:
        try:
            inventory = look_at_node(config, nvml=nvml)
        except NvshimError as failure:
            error = failure
    return {
        "nvshim": own_version(),
        "configuration": {"file": config.source or None, "notes": list(config.notes)},
        "platform": platform,
        "driver": None if inventory is None else _driver(inventory),
        "driver_error": None if error is None else {"code": error.code, "message": str(error)},
        "module_version": module_version(Fingerprint(config.host_root), config),
        "roots": _roots(config, inventory) if platform == Platform.NVML else [],
        "inventory": None if inventory is None else _freshness(config, inventory, nvml=nvml),
        "layers": None if inventory is None else _layers(config, inventory),
        "modules": [_module(config, name) for name in MODULES],
        "devices": [] if inventory is None else _devices(inventory),
        "gpus": [] if inventory is None else _gpus(inventory, config),
    }


def own_version() -> dict[str, Any]:
    """Return version, revision, path and Python of this program, a tree or a checkout."""
    path, revision = own_tree(), None
    if path:
        try:
            revision = read_tree(path).revision or None
        except NvshimError:
            pass  # it is damaged; `nvshim status` reports how
    return {
        "version": VERSION,
        "revision": revision,
        "path": path or _CHECKOUT,
        "python": sys.version.split(maxsplit=1)[0],
    }


def _gpus(inventory: Inventory, config: Config) -> list[dict[str, Any]]:
    """Return the rows of ``nvshim list``, without the containers."""
    rows = gpu_rows(inventory, config, ())
    return [{key: value for key, value in row.items() if key != "containers"} for row in rows]


def _driver(inventory: Inventory) -> dict[str, Any]:
    driver = inventory.driver
    return {
        "version": driver.version,
        "cuda": inventory.cuda_version or None,
        "architecture": driver.arch.value,
        "root": driver.root,
        "layout": driver.layout,
        "why": driver.why,
        "libraries": len(driver.libraries),
        "library_directories": list(driver.library_directories),
        "sockets": sorted(inventory.sockets.values()),
        "notes": list(driver.notes),
    }


def _layers(config: Config, inventory: Inventory) -> dict[str, Any]:
    usage = layer_usage(config.layers, inventory.files or ())
    return {"driver_layer": config.driver_layer, **usage.to_json()}


def _roots(config: Config, inventory: Inventory | None) -> list[dict[str, Any]]:
    """Return the places where a driver may be, in the order of the search."""
    chosen = None
    if inventory is not None:
        chosen = (inventory.driver.root, inventory.driver.layout)
    found = []
    for place in look(Fingerprint(config.host_root), config):
        here = (place.reader.root, place.layout.name)
        found.append(
            {
                "root": here[0],
                "layout": here[1],
                "versions": list(place.versions),
                "not_roots_alone": list(place.untrusted),
                "chosen": here == chosen,
            }
        )
        if here == chosen:
            chosen = None  # the same root and layout can occur twice; the first counts
    return found


def _freshness(config: Config, inventory: Inventory, *, nvml: bool) -> dict[str, Any]:
    file = cache.look_at_file(config)
    age = max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - inventory.taken)
    has_nvml = not inventory.nvml_failure
    return {
        "source": KEPT if inventory.kept else NVML if nvml and has_nvml else PROCFS,
        "taken": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - age)),
        "age_seconds": round(age, 1),
        "nvml": inventory.nvml_failure or None,
        "file": file.path,
        "kept": file.is_there,
        "stale": file.stale or None,
        "key": None
        if not file.is_there
        else {
            "format": file.format,
            "boot_id": file.boot_id or None,
            "observations": file.observations,
        },
        "notes": list(inventory.notes),
    }


def _module(config: Config, name: str) -> dict[str, Any]:
    version = read_text(f"{config.sys}/module/{name}/version")
    return {
        "name": name,
        "loaded": is_loaded(config, name),
        "version": (version or "").strip() or None,
    }


def _devices(inventory: Inventory) -> list[dict[str, Any]]:
    nodes = inventory.nodes
    usable = [
        {
            "path": node.path,
            "host": node.host,
            "major": node.major,
            "minor": node.minor,
            "mode": f"{node.mode:04o}",
            "fault": None,
        }
        for node in nodes.usable.values()
    ]
    empty = dict.fromkeys(("host", "major", "minor", "mode"))
    return usable + [
        {"path": path, **empty, "fault": fault} for path, fault in nodes.faults.items()
    ]
