"""The rows of ``nvshim ps``: shims, fork servers and spares, their containers and GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hooks.config import Config
from integration.containers.bundles import Container, find_containers
from integration.containers.errors import StateUnreadable
from integration.containers.exit_causes import causes_of, find_ends
from integration.containers.held_devices import Holders, indexes_of, inventory_for
from integration.containers.records import entries, strings
from integration.containers.shims import ShimProcess, all_containers, find_shims, states_of
from integration.containers.trees import is_current


def list_shims(
    asked: Iterable[str], proc: str = "/proc", config: Config | None = None
) -> list[dict[str, Any]]:
    """Return an object for each process; the keys are an interface.

    Args:
        asked: containerd's state directories, as for :func:`all_containers`.
        proc: the mount point of procfs.
        config: where the node's devices are; None to use only records.

    Raises:
        StateUnreadable: the caller may not read a named directory.
    """
    shims, named = find_shims(proc), tuple(asked)
    try:
        containers = all_containers(named, proc)
    except StateUnreadable:
        if named:
            raise
        containers = find_containers(states_of(shims), proc)  # the caller's own
    inventory = None if config is None else inventory_for(config, containers)
    holders = Holders(config, inventory)
    indexes = {**_recorded_indexes(containers), **indexes_of(inventory)}
    causes = {} if config is None else causes_of(containers, find_ends(config.state))
    by_socket: dict[tuple[str, str], list[Container]] = {}
    for each in containers:
        by_socket.setdefault((each.namespace, each.address), []).append(each)
    rows = []
    for shim in shims:
        # A container that is being created has no address yet.
        served = [
            container
            for socket in dict.fromkeys((shim.socket, ""))
            for container in by_socket.get((shim.namespace, socket), ())
        ]
        rows.append(shim_row(shim, served, holders, indexes, causes))
    return rows


def _recorded_indexes(containers: Iterable[Container]) -> dict[str, str]:
    """Return :func:`indexes_of` as records have it, from when each container was created."""
    found = {}
    for record in (container.record for container in containers):
        for gpu in entries(record, "grant", "gpus"):
            found[str(gpu.get("uuid") or gpu.get("bus_id"))] = str(gpu.get("index"))
        for device in entries(record, "grant", "mig_devices"):
            found[str(device.get("uuid"))] = f"{device.get('gpu')}:{device.get('index')}"
    return found


def shim_row(
    shim: ShimProcess,
    containers: Iterable[Container],
    holders: Holders | None = None,
    indexes: Mapping[str, str] | None = None,
    causes: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the row of one process: plain values; the keys are an interface.

    Args:
        containers: the containers of the node.
        holders: the devices of each container; None to use only records.
        indexes: the indexes of the node's devices by UUID; None if unknown.
        causes: why containers ended, by bundle; None if unknown.
    """
    served = shim.of(containers)
    held = {c.bundle: _held(c, holders) for c in served}
    pods = [c.pod for c in served if c.pod is not None]
    gpus = list(dict.fromkeys(name for c in served for name in held[c.bundle]))
    tree = shim.tree
    return {
        "pid": shim.pid,
        "kind": shim.kind,
        "uid": shim.uid,
        "namespace": shim.namespace or None,
        "id": shim.group or None,
        "pod": {"namespace": pods[0].namespace, "name": pods[0].name} if pods else None,
        "containers": [
            {**c.to_json(), "gpus": held[c.bundle], "cause": (causes or {}).get(c.bundle)}
            for c in served
            if not c.sandbox
        ],
        "gpus": gpus,
        "gpu_indexes": [(indexes or {}).get(name) for name in gpus],
        "memory": None
        if shim.memory is None
        else {"pss_bytes": shim.memory[0], "uss_bytes": shim.memory[1]},
        "version": (tree.version or None) if tree else None,
        "tree": tree.path if tree else None,
        "current": is_current(tree) if tree else None,
        "warm": shim.warm,
        "age_seconds": round(shim.age, 1),
        "containerd": shim.address or None,
        "socket": shim.socket or None,
        "bundle": shim.bundle or None,
    }


def _held(container: Container, holders: Holders | None) -> list[str]:
    named = held_names(container.record)
    if named or holders is None or container.sandbox or not container.pid:
        return named
    return list(holders.devices_of(container))


def held_names(record: Mapping[str, Any] | None) -> list[str]:
    """Return the UUIDs, or else the names, of the devices that a record grants.

    Args:
        record: the record of an injection; None for an empty one.
    """
    held = [*entries(record, "grant", "gpus"), *entries(record, "grant", "mig_devices")]
    names = [entry.get("uuid") or entry.get("bus_id") or "" for entry in held]
    for vendor in entries(record, "vendors"):
        names += strings(vendor, "granted")
    return [name for name in names if name and isinstance(name, str)]
