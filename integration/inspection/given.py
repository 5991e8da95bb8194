"""What a container has of NVIDIA's devices that the shim has not given: for ``nvshim explain``.

An engine that applies CDI itself (containerd 2 does, for a kubelet's device plugin or a DRA
driver), a device plugin that lists device nodes, and ``--device`` write it into the spec before the
shim sees it. The shim is not asked then, and writes no record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hooks.config import Config
from hooks.node.inventory import Inventory
from hooks.sharing import id_of
from integration.inspection.holding import Holders, by_nodes_of, inventory_for, nodes_in

if TYPE_CHECKING:
    from integration.inspection.bundles import Container

_NODES: Final = "/dev/nvidia"


@dataclass(frozen=True, slots=True)
class Given:
    """What a container has, and by whom."""

    # GPUs and MIG devices, as a record's grant has them, with their ``kind``
    devices: tuple[dict[str, Any], ...]
    nodes: tuple[str, ...]  # the paths of NVIDIA's nodes in its spec
    # the UUIDs of what it has and the node has not, or not as far as is known
    unknown: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As an answer has it."""
        return {
            "devices": list(self.devices),
            "nodes": list(self.nodes),
            "unknown": list(self.unknown),
        }

    def lines(self) -> list[str]:
        """For people."""
        found = [_line(each) for each in self.devices]
        found += [f"{each}, which is not known of this node now" for each in self.unknown]
        found = found or ["no GPU that is known of this node now"]
        if not self.nodes:
            return [*found, "by its claim, or the node agent's ledger; its spec does not tell"]
        return [
            *found,
            f"by nodes that its spec lists: {', '.join(self.nodes)}",
            "who made the spec has put them there: an engine that applies CDI, or --device",
        ]


def _line(device: Mapping[str, Any]) -> str:
    if device["kind"] == "gpu":
        return f"GPU {device['index']}: {device['model']}, {device['uuid']}, at {device['bus_id']}"
    place = f"{device['gpu']}:{device['index']}"
    return f"MIG device {place}: {device['profile']}, {device['uuid']}"


def given_to(container: Container, config: Config) -> Given | None:
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
    nodes = _of_nvidia(nodes_in(container.spec()))
    inventory = inventory_for(config, [container])
    return _given(Holders(config, inventory).devices_of(container), nodes, inventory)


def given_in(spec: Mapping[str, Any], config: Config) -> Given | None:
    """What a spec gives before the shim sees it, as :func:`given_to`.

    Raises:
        MalformedSpec: the spec has the wrong shape.
    """
    nodes = _of_nvidia(nodes_in(spec))
    if not nodes:
        return None
    inventory = inventory_for(config, ())
    held = by_nodes_of(nodes, inventory) if inventory is not None else {}
    return _given(held, nodes, inventory)


def _of_nvidia(nodes: Iterable[str]) -> tuple[str, ...]:
    return tuple(path for path in nodes if path.startswith(_NODES))


def _given(
    held: Iterable[str], nodes: tuple[str, ...], inventory: Inventory | None
) -> Given | None:
    known = {} if inventory is None else _known(inventory)
    devices, unknown = [], []
    for name in held:
        if name in known:
            devices.append(known[name])
        else:
            unknown.append(name)
    return Given(tuple(devices), nodes, tuple(unknown)) if devices or unknown or nodes else None


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
