"""List the node's GPUs and MIG devices, and the containers that hold them.

Rules
- A container holds what :mod:`integration.containers.held_devices` finds, whoever assigned it,
  while its init process runs. GPUs of other vendors are found by the device nodes in its record or
  spec.
- A GPU that a container holds but the node no longer has is listed as well, with a fault.
- A container is stale if driver files that it was started with no longer exist, for example after
  an update.
- A Tegra machine and a WSL2 machine count as one GPU each, because their drivers do not list GPUs.
- Health is the judgement of the node agent; it is null without an agent. A fault is visible on the
  node: a GPU that fell off the bus, a missing device node. A device is out of service if someone
  drained it (`nvshim drain`).

Source: the kernel's Documentation/ABI/testing/sysfs-bus-pci (numa_node).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Final

from api.errors import NvshimError
from hooks import platforms
from hooks.config import Config, Platform
from hooks.errors import DriverNotFound
from hooks.node.fingerprint import read_text
from hooks.node.gpus import Gpu, MigDevice, Nodes
from hooks.node.inventory import Inventory
from hooks.platforms import tegra, wsl
from hooks.sharing import id_of
from hooks.vendors import amd, intel
from hooks.vendors.gpus import VendorGpu
from hooks.words import NVIDIA
from integration.containers.bundles import Container
from integration.containers.held_devices import Holders, nodes_of
from integration.containers.records import entries, strings
from integration.node.holders.holders import stale_of
from integration.nvml.fabric import fabrics_of
from integration.nvml.inventory import look_at_node
from integration.nvml.values import Fabric

_ABSENT: Final = "a container holds it, but the node no longer has it"

_EMPTY_ROW: Final = {
    "kind": "gpu",
    "vendor": None,
    "index": None,
    "mig_index": None,
    "uuid": None,
    "name": None,
    "pci": None,
    "minor": None,
    "profile": None,
    "mig_mode": None,
    "memory_bytes": None,
    "numa_node": None,
    "fabric": None,
    "health": None,
    "health_reason": None,
    "fault": None,
    "out_of_service": None,
    "excluded": False,
    "containers": None,
}
"""A row without values: every row has these keys, in this order."""


def list_gpus(
    config: Config,
    containers: Iterable[Container] | None,
    *,
    nvml: bool = True,
    fabric: bool = False,
    health: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Return the node's GPUs of every vendor.

    Args:
        config: locates the node's devices.
        containers: the node's containers; None if unknown.
        nvml: whether to query NVML if no inventory is cached.
        fabric: whether to query NVML for the NVLink fabric, which no inventory has.
        health: the agent's entry for each device, by UUID; None without an agent.

    Returns:
        An object for each GPU, followed by one for each of its MIG devices; the keys are a public
        interface.

    Raises:
        DriverNotFound: there is no driver, and no GPU that works without one.
        DriverMismatch: the driver's files do not match the loaded kernel module's version.
    """
    running = [each for each in containers or () if each.pid]
    known = health or {}
    stale = {(each.namespace, each.id): stale_of(each) or None for each in running}
    rows = [
        {**row, **_health(known.get(row["uuid"])), "containers": [
            {**holder, "stale": stale.get((holder["namespace"], holder["id"]))}
            for holder in row["containers"] or ()
        ]}
        for row in _rows(config, running, nvml=nvml, fabric=fabric)
    ]  # fmt: skip
    return rows if containers is not None else [{**row, "containers": None} for row in rows]


def _health(known: Mapping[str, Any] | None) -> dict[str, Any]:
    if known is None:
        return {"health": None, "health_reason": None}
    return {"health": known["state"], "health_reason": known["reason"] or None}


def _rows(
    config: Config, running: list[Container], *, nvml: bool, fabric: bool
) -> list[dict[str, Any]]:
    others = [_vendor_row(gpu, config, running) for gpu in _other_vendor_gpus(config)]
    platform = platforms.platform_of(config)
    if platform != Platform.NVML:
        return [_platform_row(platform, running), *others]
    try:
        inventory = look_at_node(config, nvml=nvml)
    except DriverNotFound:
        if not others:
            raise
        return others
    fabrics = fabrics_of(config, inventory) if nvml and fabric else {}
    return gpu_rows(inventory, config, running, fabrics) + others


def gpu_rows(
    inventory: Inventory,
    config: Config,
    containers: Iterable[Container],
    fabrics: Mapping[str, Fabric] | None = None,
) -> list[dict[str, Any]]:
    """Return NVIDIA's part of :func:`list_gpus`."""
    running = list(containers)
    holders = Holders(config, inventory)
    held: dict[str, list[dict[str, Any]]] = {}
    for container in running:
        for device in holders.devices_of(container):
            held.setdefault(device, []).append(container.to_json())
    rows = []
    for gpu in inventory.gpus:
        place = (fabrics or {}).get(gpu.uuid)
        row = _gpu_row(gpu, inventory, config, held)
        rows.append(row if place is None else {**row, "fabric": asdict(place)})
        rows += [
            _mig_row(device, gpu, rows[-1], inventory, held)
            for device in inventory.mig_devices
            if device.gpu == gpu.index
        ]
    known = {row["uuid"] for row in rows}
    absent: dict[str, dict[str, Any]] = {}
    for container in running:
        for kind, entry in _granted(container.record):
            if entry["uuid"] not in known:
                row = absent.setdefault(entry["uuid"], _absent_row(kind, entry))
                row["containers"].append(container.to_json())
    return rows + list(absent.values())


def _other_vendor_gpus(config: Config) -> list[VendorGpu]:
    try:
        return [*amd.find(config)[0], *intel.find(config)]
    except NvshimError:
        return []


def _gpu_row(
    gpu: Gpu, inventory: Inventory, config: Config, held: Mapping[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    return {
        **_EMPTY_ROW,
        "vendor": NVIDIA,
        "index": gpu.index,
        "uuid": gpu.uuid or None,
        "name": gpu.model or None,
        "pci": gpu.bus_id,
        "minor": gpu.minor,
        "mig_mode": gpu.mig,
        "memory_bytes": gpu.memory,
        "numa_node": _numa_node(config, gpu.bus_id),
        "fault": _fault_of(gpu, inventory.nodes),
        "out_of_service": gpu.drained or _with_driver(inventory),
        "excluded": gpu.excluded,
        "containers": held.get(id_of(gpu), []),
    }


def _fault_of(gpu: Gpu, nodes: Nodes) -> str | None:
    """Return a GPU's fault; NVML also calls a GPU lost if it cannot open the device node."""
    fault = nodes.faults.get(gpu.path)
    return fault if gpu.path in nodes.wrong else gpu.lost or fault


def _mig_row(
    device: MigDevice,
    gpu: Gpu,
    parent: Mapping[str, Any],
    inventory: Inventory,
    held: Mapping[str, list[dict[str, Any]]],
) -> dict[str, Any]:
    faults = [inventory.nodes.faults.get(path) for path in device.paths]
    return {
        **parent,
        "kind": "mig",
        "mig_index": device.index,
        "uuid": device.uuid,
        "name": f"{gpu.model} MIG {device.profile}".strip(),
        "profile": device.profile or None,
        "mig_mode": None,
        "memory_bytes": None,
        "fault": next((fault for fault in faults if fault), parent["fault"]),
        "out_of_service": device.drained or _with_driver(inventory),
        "containers": held.get(device.uuid, []),
    }


def _with_driver(inventory: Inventory) -> str | None:
    return f"with the driver, {inventory.drained}" if inventory.drained else None


def _vendor_row(gpu: VendorGpu, config: Config, running: list[Container]) -> dict[str, Any]:
    node = gpu.device.render_node
    return {
        **_EMPTY_ROW,
        "vendor": gpu.vendor,
        "index": gpu.index,
        "name": f"{gpu.vendor} {gpu.device.device_id}".strip(),
        "pci": gpu.address,
        "minor": gpu.device.minors.get(node) if node else None,
        "numa_node": _numa_node(config, gpu.address),
        "excluded": gpu.address in config.excluded_gpus,
        "containers": [c.to_json() for c in running if node and f"/dev/dri/{node}" in _nodes(c)],
    }


def _platform_row(platform: str, running: list[Container]) -> dict[str, Any]:
    """Return one row for a machine whose driver does not enumerate GPUs."""
    vendor = wsl.PLATFORM if platform == Platform.WSL else tegra.PLATFORM
    return {
        **_EMPTY_ROW,
        "vendor": vendor,
        "name": vendor,
        "containers": [
            c.to_json()
            for c in running
            for each in entries(c.record, "vendors")
            if each.get("vendor") == vendor and strings(each, "granted")
        ],
    }


def _absent_row(kind: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    is_mig = kind == "mig"
    return {
        **_EMPTY_ROW,
        "kind": kind,
        "vendor": NVIDIA,
        "index": entry.get("gpu") if is_mig else entry.get("index"),
        "mig_index": entry.get("index") if is_mig else None,
        "uuid": entry["uuid"],
        "name": entry.get("model") or entry.get("profile"),
        "pci": entry.get("bus_id"),
        "profile": entry.get("profile"),
        "fault": _ABSENT,
        "containers": [],
    }


def _granted(record: Mapping[str, Any] | None) -> list[tuple[str, Mapping[str, Any]]]:
    granted = (("gpu", entries(record, "grant", "gpus")),
               ("mig", entries(record, "grant", "mig_devices")))  # fmt: skip
    return [
        (kind, entry)
        for kind, its in granted
        for entry in its
        if entry.get("uuid") and isinstance(entry["uuid"], str)
    ]


def _nodes(container: Container) -> list[str]:
    """Return the paths of the device nodes that a container was given."""
    ours = [str(node.get("path")) for node in entries(container.record, "edits", "devices")]
    return ours or nodes_of(container)


def _numa_node(config: Config, address: str) -> int | None:
    """Return a device's NUMA node; None if the machine does not report it."""
    text = (read_text(f"{config.sys}/bus/pci/devices/{address}/numa_node") or "").strip()
    return int(text) if text.isdecimal() else None
