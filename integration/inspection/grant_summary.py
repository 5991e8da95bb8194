"""What a container has of NVIDIA's devices that the shim has not given: for ``nvshim explain``.

An engine that applies CDI itself (containerd 2 does, for a kubelet's device plugin or a DRA
driver), a device plugin that lists device nodes, and ``--device`` write it into the spec before the
shim sees it: nodes, mounts and hooks. The shim does in process what NVIDIA's hooks would, and its
record says so (:mod:`hooks.record`, ``spec_hooks``). Other hooks are the runtime's to run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hooks.config import Config
from hooks.node.inventory import Inventory
from hooks.sharing import id_of
from integration.containers.held_devices import Holders, by_nodes_of, inventory_for, nodes_in
from integration.containers.records import entries

if TYPE_CHECKING:
    from integration.containers.bundles import Container

_NODES: Final = "/dev/nvidia"
# What a driver calls its files: by itself, or a library by the driver's version.
_OF_DRIVER: Final = re.compile(r"nvidia|/libcuda[^/]*$|\.so\.\d+\.\d+(\.\d+)?$", re.ASCII)


@dataclass(frozen=True, slots=True)
class GrantSummary:
    """What a container has, and by whom."""

    # GPUs and MIG devices, as a record's grant has them, with their ``kind``
    devices: tuple[dict[str, Any], ...]
    nodes: tuple[str, ...]  # the paths of NVIDIA's nodes in its spec
    # the UUIDs of what it has and the node has not, or not as far as is known
    unknown: tuple[str, ...] = ()
    mounts: int = 0  # how many of the driver's files its spec mounts

    def to_json(self) -> dict[str, Any]:
        """As an answer has it."""
        return {
            "devices": list(self.devices),
            "nodes": list(self.nodes),
            "unknown": list(self.unknown),
            "mounts": self.mounts,
        }

    def lines(self) -> list[str]:
        """For people."""
        found = [_line(each) for each in self.devices]
        found += [f"{each}, which is not known of this node now" for each in self.unknown]
        found = found or ["no GPU that is known of this node now"]
        if not self.nodes:
            return [*found, "by its claim, or the node agent's ledger; its spec does not tell"]
        mounts = [f"and {files_of_driver(self.mounts)} that it mounts"] if self.mounts else []
        return [
            *found,
            f"by nodes that its spec lists: {', '.join(self.nodes)}",
            *mounts,
            "who made the spec has put them there: an engine that applies CDI, or --device",
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
    """What a container has by another than the shim.

    Args:
        container: which; it has no record, or its request was denied.
        config: where the node's devices are.

    Returns:
        What is known of it; None for nothing.

    Raises:
        BundleUnusable: its bundle is gone, or is not what we wrote.
        MalformedSpec: its spec has the wrong shape.
    """
    spec = container.spec_before() or container.spec()
    inventory = inventory_for(config, [container])
    return _summary(Holders(config, inventory).devices_of(container), spec, inventory)


def grants_of_spec(spec: Mapping[str, Any], config: Config) -> GrantSummary | None:
    """What a spec gives before the shim sees it, as :func:`given_to`.

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
    """Count the driver's files that a spec mounts, by their names."""
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
