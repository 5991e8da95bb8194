"""What a container holds of NVIDIA's devices, whoever gave it.

Rules
- A container holds what its record says that it was given, and the devices whose nodes the shim
  gave it by a CDI file.
- Without a record its spec tells: an engine that applies CDI itself, a device plugin's device nodes
  and ``--device`` put nodes there before the shim sees it. Of a privileged container that says
  nothing: it has every node of the host.
- A node of a GPU that goes with one of its MIG devices is not the whole GPU.
- Where neither tells (a privileged container; NVML does not answer, and nothing is kept), the claim
  of the container does (:mod:`shim.work.claims`), or else the ledger of an agent that keeps the
  node.

Source: :mod:`hooks.record`, :mod:`hooks.sharing`; CDI specification, "deviceNodes".
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from api.errors import NvshimError
from hooks.config import Config
from hooks.node.inventory import Inventory, survey
from hooks.requests.policy import read_container
from hooks.sharing import held_by_nodes, held_by_record, id_of
from integration.agent_status import is_ready
from integration.containers.records import entries, strings
from integration.files import read_file
from integration.json_documents import parse_json
from integration.nvml.inventory import look_at_node
from shim import bundle as bundle_files
from shim import files
from shim.work import claims

if TYPE_CHECKING:
    from integration.containers.bundles import Container

LEDGER: Final = "ledger.json"
"""What the agent writes of who holds what, in the directory of our state."""

_CAPS: Final = "/dev/nvidia-caps/"

# What a spec has in it that lists a GPU's node.
_MARKS: Final = (b"nvidia", b"/dev/dri")


class Holders:
    """Who holds what on a node, by all that tells of it.

    Args:
        config: where claims, and the agent's ledger, are; None if that is not known.
        inventory: what the node has; None if that is not known.
    """

    def __init__(self, config: Config | None, inventory: Inventory | None) -> None:
        self._inventory = inventory
        self._kept = {} if config is None else {**_by_agent(config), **_by_claims(config)}

    def devices_of(self, container: Container) -> tuple[str, ...]:
        """The UUIDs of what a container holds."""
        devices, _ = devices_of(container, self._inventory)
        return devices or self._kept.get(container.bundle, ())


def devices_of(
    container: Container, inventory: Inventory | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The UUIDs of what a container holds, and of the GPUs that those are, or are parts of.

    Args:
        container: which.
        inventory: what the node has; None if that is not known.
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
    """What a container has by its nodes, as :func:`held_by_nodes`, and nothing that is a guess."""
    named = tuple(paths)
    if inventory.nvml_failure and _are_of_parts(named):
        return {}  # of MIG devices, which NVML alone knows
    return held_by_nodes(named, inventory)


def inventory_for(config: Config, containers: Iterable[Container]) -> Inventory | None:
    """What the node has, as far as it has to be known for what containers hold.

    NVML is asked only if no inventory is kept that is still true, and a container has nodes of MIG
    devices.

    Returns:
        The inventory; None if there is none.
    """
    try:
        inventory = survey(config)
        if inventory.nvml_failure and any(_are_of_parts(nodes_of(each)) for each in containers):
            inventory = look_at_node(config)
    except NvshimError:
        return None
    return inventory


def indexes_of(inventory: Inventory | None) -> dict[str, str]:
    """By which index people call each device of a node: "0", or "0:1" for a MIG device.

    Args:
        inventory: what the node has; None if that is not known.

    Returns:
        By UUID, or by PCI address for a GPU that has none.
    """
    if inventory is None:
        return {}
    gpus = {id_of(gpu): str(gpu.index) for gpu in inventory.gpus}
    return gpus | {each.uuid: f"{each.gpu}:{each.index}" for each in inventory.mig_devices}


def _are_of_parts(paths: Iterable[str]) -> bool:
    return any(path.startswith(_CAPS) for path in paths)


def nodes_of(container: Container) -> list[str]:
    """The paths of the GPUs' nodes, and others, that a container's spec lists."""
    path = os.path.join(container.bundle, bundle_files.CONFIG)
    try:
        content = files.read(path, bundle_files.LONGEST_SPEC)
        if not any(mark in content for mark in _MARKS):
            return []  # as most: it need not be parsed for that
        return nodes_in(files.parse_object(content, path))
    except NvshimError:
        return []  # a sandbox, or a bundle that goes


def nodes_in(spec: Mapping[str, Any]) -> list[str]:
    """The paths of the device nodes that a spec lists; none of a privileged container's.

    Raises:
        MalformedSpec: a part of it has the wrong shape.
    """
    if read_container(spec).privileged:
        return []  # to list them all is to say nothing of any of them
    nodes = entries(spec, "linux", "devices")
    return [str(node.get("path")) for node in nodes if node.get("type") == "c"]


def is_privileged(container: Container) -> bool:
    """Whether a container has every node of the host, as far as its spec can be read."""
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
        return {}  # what one that is gone has seen says nothing of now
    rows = entries(document, "holdings")
    return {str(row.get("bundle")): tuple(strings(row, "devices")) for row in rows}
