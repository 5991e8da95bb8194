"""The NVIDIA devices that a container holds, whoever assigned them.

Rules
- A container holds what its record grants, and the devices whose nodes the shim added from a CDI
  file.
- Without a record, its spec decides: an engine that applies CDI itself, a device plugin or
  ``--device`` adds device nodes before the shim sees the spec. The spec of a privileged container
  proves nothing, because it has every node of the host.
- If a container has a MIG device, the node of its GPU does not mean that it holds the whole GPU.
- If neither decides (for a privileged container, or if NVML does not answer and no inventory is
  cached), the claim of the container decides (:mod:`shim.work.claims`), or else the ledger of a
  running agent.

Source: :mod:`hooks.record`, :mod:`hooks.sharing`; CDI specification, "deviceNodes".
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

from api.errors import NvshimError
from hooks.config import Config
from hooks.node.inventory import Inventory, survey
from hooks.requests.policy import read_container
from hooks.sharing import held_by_nodes, held_by_record, id_of
from integration.agent_status import is_ready
from integration.containers.bundles import Container
from integration.containers.records import entries, strings
from integration.files import read_file
from integration.json_documents import parse_json
from integration.nvml.inventory import look_at_node
from shim.work import claims

LEDGER: Final = "ledger.json"
"""The agent's file of which container holds what, in our state directory."""

_CAPS: Final = "/dev/nvidia-caps/"

# A spec that lists a GPU's node contains one of these.
_MARKS: Final = (b"nvidia", b"/dev/dri")


class Holders:
    """Looks up the devices of containers in all sources: records, specs, claims and the ledger.

    Args:
        config: where claims and the agent's ledger are stored; None to use neither.
        inventory: the node's devices; None if unknown.
    """

    def __init__(self, config: Config | None, inventory: Inventory | None) -> None:
        self._inventory = inventory
        self._kept = {} if config is None else {**_by_agent(config), **_by_claims(config)}

    def devices_of(self, container: Container) -> tuple[str, ...]:
        """Return the UUIDs of the devices that a container holds."""
        devices, _ = devices_of(container, self._inventory)
        return devices or self._kept.get(container.bundle, ())


def devices_of(
    container: Container, inventory: Inventory | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the UUIDs of the devices that a container holds, and of their GPUs.

    Args:
        inventory: the node's devices; None if unknown.
    """
    record = container.record
    held = held_by_record(record, inventory) if record else {}
    if inventory is not None:
        listed = entries(record, "edits", "devices") if record else []
        paths = [str(node.get("path")) for node in listed]
        if not held:
            paths += nodes_of(container)
        divided = {gpu for device, gpu in held.items() if device != gpu}
        by_nodes = by_nodes_of(paths, inventory)
        held |= {device: gpu for device, gpu in by_nodes.items() if device not in divided}
    return tuple(held), tuple(dict.fromkeys(gpu for gpu in held.values() if gpu))


def by_nodes_of(paths: Iterable[str], inventory: Inventory) -> dict[str, str]:
    """Return :func:`held_by_nodes`, or nothing where the answer would be a guess."""
    named = tuple(paths)
    if inventory.nvml_failure and _are_of_parts(named):
        return {}  # only NVML knows MIG devices
    return held_by_nodes(named, inventory)


def inventory_for(config: Config, containers: Iterable[Container]) -> Inventory | None:
    """Return an inventory good enough to tell what containers hold; None if there is none.

    NVML is asked only if no valid inventory is cached and a container has nodes of MIG devices.
    """
    try:
        inventory = survey(config)
        if inventory.nvml_failure and any(_are_of_parts(nodes_of(each)) for each in containers):
            inventory = look_at_node(config)
    except NvshimError:
        return None
    return inventory


def indexes_of(inventory: Inventory | None) -> dict[str, str]:
    """Return the index of each device of a node: "0", or "0:1" for a MIG device.

    Args:
        inventory: the node's devices; None if unknown.

    Returns:
        The indexes by UUID, or by PCI address for a GPU without one.
    """
    if inventory is None:
        return {}
    gpus = {id_of(gpu): str(gpu.index) for gpu in inventory.gpus}
    return gpus | {each.uuid: f"{each.gpu}:{each.index}" for each in inventory.mig_devices}


def _are_of_parts(paths: Iterable[str]) -> bool:
    return any(path.startswith(_CAPS) for path in paths)


def nodes_of(container: Container) -> list[str]:
    """Return the device nodes in a container's spec if it lists a GPU's node."""
    spec = container.spec_if(*_MARKS)
    try:
        return nodes_in(spec) if spec else []
    except NvshimError:
        return []


def nodes_in(spec: Mapping[str, Any]) -> list[str]:
    """Return the device nodes that a spec lists; none for a privileged container.

    Raises:
        MalformedSpec: a part of it has the wrong type.
    """
    if read_container(spec).privileged:
        return []  # it lists every node of the host
    nodes = entries(spec, "linux", "devices")
    return [str(node.get("path")) for node in nodes if node.get("type") == "c"]


def is_privileged(container: Container) -> bool:
    """Whether a container has every node of the host; False if its spec cannot be read."""
    try:
        return read_container(container.spec()).privileged
    except NvshimError:
        return False


def _by_claims(config: Config) -> dict[str, tuple[str, ...]]:
    try:
        found = list(claims.read_claims(os.path.join(config.state, claims.DIRECTORY)))
    except OSError:
        return {}  # the caller is not root
    return {kept.bundle: tuple(kept.devices) for _, kept, holds in found if kept and holds}


def _by_agent(config: Config) -> dict[str, tuple[str, ...]]:
    try:
        document = parse_json(read_file(os.path.join(config.state, LEDGER)) or b"{}")
    except (OSError, ValueError):
        return {}

    if not is_ready(config):
        return {}  # the ledger of an agent that has exited is out of date
    rows = entries(document, "holdings")
    return {str(row.get("bundle")): tuple(strings(row, "devices")) for row in rows}
