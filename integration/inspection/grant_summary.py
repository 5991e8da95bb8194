"""List the NVIDIA devices that a container got from someone other than the shim.

Some components write device nodes, mounts and hooks into the spec before the shim sees it: an
engine that applies CDI itself (containerd 2, for a device plugin or a DRA driver), a device plugin
that lists device nodes, and ``--device``. The shim does the work of NVIDIA's hooks in process and
records it (:mod:`hooks.record`, ``spec_hooks``). The runtime runs all other hooks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hooks.config import Config
from hooks.node.inventory import Inventory
from hooks.sharing import id_of
from integration.containers.bundles import Container
from integration.containers.held_devices import Holders, by_nodes_of, inventory_for, nodes_in
from integration.containers.records import entries

_NODES: Final = "/dev/nvidia"
# The names of a driver's files: their own, or a library with the driver's version.
_OF_DRIVER: Final = re.compile(r"nvidia|/libcuda[^/]*$|\.so\.\d+\.\d+(\.\d+)?$", re.ASCII)


@dataclass(frozen=True, slots=True)
class GrantSummary:
    """The devices of a container, and where they come from."""

    # GPUs and MIG devices, in the form of a record's grant, with their ``kind``
    devices: tuple[dict[str, Any], ...]
    nodes: tuple[str, ...]  # the paths of NVIDIA's device nodes in its spec
    # UUIDs of devices that the node does not have, or that we do not know
    unknown: tuple[str, ...] = ()
    mounts: int = 0  # how many driver files its spec mounts

    def to_json(self) -> dict[str, Any]:
        """Return plain values for output."""
        return {
            "devices": list(self.devices),
            "nodes": list(self.nodes),
            "unknown": list(self.unknown),
            "mounts": self.mounts,
        }

    def lines(self) -> list[str]:
        """Return lines for a terminal."""
        found = [_line(each) for each in self.devices]
        found += [f"{each}, which this node does not have now" for each in self.unknown]
        found = found or ["no GPU that this node has now"]
        if not self.nodes:
            return [*found, "known from its claim or the node agent's ledger, not from its spec"]
        mounts = [f"and {files_of_driver(self.mounts)} mounted by its spec"] if self.mounts else []
        return [
            *found,
            f"by device nodes in its spec: {', '.join(self.nodes)}",
            *mounts,
            "added before the shim saw the spec: by an engine that applies CDI, or by --device",
        ]


def files_of_driver(count: int) -> str:
    """Return a count of files with its noun."""
    return f"{count} file{'' if count == 1 else 's'} of the driver"


def _line(device: Mapping[str, Any]) -> str:
    if device["kind"] == "gpu":
        return f"GPU {device['index']}: {device['model']}, {device['uuid']}, at {device['bus_id']}"
    place = f"{device['gpu']}:{device['index']}"
    return f"MIG device {place}: {device['profile']}, {device['uuid']}"


def grants_of_container(container: Container, config: Config) -> GrantSummary | None:
    """Return the devices that a container got from someone other than the shim.

    Args:
        container: one without a record, or whose request was denied.
        config: locates the node's devices.

    Returns:
        The devices; None if there are none.

    Raises:
        BundleUnusable: its bundle was removed, or is not one that we wrote.
        MalformedSpec: its spec has the wrong shape.
    """
    spec = container.spec_before() or container.spec()
    inventory = inventory_for(config, [container])
    return _summary(Holders(config, inventory).devices_of(container), spec, inventory)


def grants_of_spec(spec: Mapping[str, Any], config: Config) -> GrantSummary | None:
    """Return the devices that a spec has before the shim sees it; None for nothing.

    Raises:
        MalformedSpec: the spec has the wrong shape.
    """
    nodes = _of_nvidia(nodes_in(spec))
    if not nodes:
        return None
    inventory = inventory_for(config, ())
    held = by_nodes_of(nodes, inventory) if inventory is not None else {}
    return _summary(held, spec, inventory)


def _of_nvidia(nodes: Iterable[str]) -> tuple[str, ...]:
    return tuple(path for path in nodes if path.startswith(_NODES))


def _mounts_in(spec: Mapping[str, Any]) -> int:
    """Count the driver files that a spec mounts, by their names."""
    sources = (str(mount.get("source")) for mount in entries(spec, "mounts"))
    return sum(1 for source in sources if _OF_DRIVER.search(source))


def _summary(
    held: Iterable[str], spec: Mapping[str, Any], inventory: Inventory | None
) -> GrantSummary | None:
    nodes = _of_nvidia(nodes_in(spec))
    known = {} if inventory is None else _known(inventory)
    devices, unknown = [], []
    for name in held:
        if name in known:
            devices.append(known[name])
        else:
            unknown.append(name)
    if not devices and not unknown and not nodes:
        return None
    return GrantSummary(tuple(devices), nodes, tuple(unknown), _mounts_in(spec))


def _known(inventory: Inventory) -> dict[str, dict[str, Any]]:
    gpus = {
        id_of(g): {
            "kind": "gpu", "index": g.index, "uuid": g.uuid, "bus_id": g.bus_id, "model": g.model,
        }
        for g in inventory.gpus
    }  # fmt: skip
    parts = {
        d.uuid: {
            "kind": "mig", "gpu": d.gpu, "index": d.index, "uuid": d.uuid, "profile": d.profile,
        }
        for d in inventory.mig_devices
    }  # fmt: skip
    return gpus | parts
