"""Read the node once, and update the cached inventory and the CDI spec.

Rules
- The shim reads the node itself when it creates a container, and works without an agent. The
  cached inventory saves the next container a query of NVML. The CDI spec is for other runtimes
  (Podman, CRI-O, Docker's ``--device``).
- The spec is replaced in one step, and only if its content changes. Without a driver it is removed:
  a stale spec fails containers with a misleading error.
- Only files that this project has made are replaced or removed. Their first line marks them. The
  unit that makes the spec on nodes without an agent marks its files as well.
- While the driver is out of service, NVML is not queried; the cached inventory is used if it still
  matches the node.
- A fault of the node is part of the result and does not end the agent.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Final

from api.errors import NvshimError
from hooks.cdi import generating, schema
from hooks.config import Config
from hooks.node.drained import driver_of, read_drains
from hooks.node.inventory import Inventory, load_inventory
from integration.cdi.writing import text_of
from integration.node.spec_files import put, still_true
from integration.nvml.inventory import inventory_of
from integration.nvml.snapshot import NodeSnapshot

MARK: Final = b"# Made by nvshim node, which replaces it when the node changes.\n"
"""The first line of the spec. A file without it belongs to another program."""

MARK_OF_UNIT: Final = b"# Made by nvshim-cdi-refresh.service, until nvshim node replaces it.\n"
"""The first line of a spec made by ``integration/systemd/nvshim-cdi-refresh.service``."""

_MARKS: Final = (MARK, MARK_OF_UNIT)

# After this many rounds without a change, generate the text again anyway.
_TRUSTED_ROUNDS: Final = 10

_OPTIONS: Final = generating.SpecOptions(
    kind="gpu",
    vendor="",
    class_="",
    directories=(),
    annotations=(),
    strategies=("index", "uuid"),
    capabilities=generating.DEFAULT_CAPABILITIES,
)


class SpecText:
    """The text of the CDI spec, cached for as long as the node stays the same.

    Generating it takes half a second for a hundred MIG devices. It is generated again when a change
    was reported, when the inventory differs, and at every tenth round in case both were missed.
    """

    def __init__(self) -> None:
        self._inventory: Inventory | None = None
        self._text = b""
        self._used = 0

    def get(self, inventory: Inventory, config: Config, *, changed: bool) -> bytes:
        """Return the text for an inventory."""
        self._used += 1
        if changed or self._used >= _TRUSTED_ROUNDS or inventory != self._inventory:
            self._text = _text(inventory, config)
            self._inventory, self._used = inventory, 0
        return self._text


def look(config: Config, *, changed: bool = False, ask_nvml: bool = False) -> NodeSnapshot:
    """Read the node.

    Args:
        changed: something has changed, so query NVML again even if it has just failed.
        ask_nvml: query NVML even if the cached inventory seems to match the node.

    Returns:
        The node and its faults, without a spec.
    """
    try:
        if why := driver_of(read_drains(config)):
            # A query of NVML, or a new device node, would load the driver again.
            return NodeSnapshot(load_inventory(config), (f"the driver is out of service {why}",))
        inventory = inventory_of(config, confirmed=changed, fresh=ask_nvml)
    except NvshimError as error:
        return NodeSnapshot(faults=(str(error),))
    unanswered = [f"NVML: {inventory.nvml_failure}"] if inventory.nvml_failure else []
    return NodeSnapshot(inventory, (*unanswered, *inventory.notes))


def keep_spec(
    config: Config, spec: str, node: NodeSnapshot, *, changed: bool, text: SpecText
) -> NodeSnapshot:
    """Bring the CDI spec up to date.

    Args:
        spec: the path of the spec; "" for none.

    Returns:
        The node with its spec, and the faults of both.
    """
    if not spec:
        return node
    inventory, faults = node.inventory, list(node.faults)
    content: bytes | None = None
    try:
        if inventory is not None:
            kept = still_true(spec, inventory, config, _whose)
            content = kept[0] if kept else text.get(inventory, config, changed=changed)
    except NvshimError as error:
        faults.insert(0, str(error))
    written = False
    try:
        written = put(spec, content, _whose)
    except OSError as error:
        faults.insert(0, f"{error.filename or spec}: {error.strerror}")
    return replace(
        node,
        spec=spec if content is not None and os.path.exists(spec) else "",
        written=written,
        faults=tuple(faults),
    )


def _text(inventory: Inventory, config: Config) -> bytes:
    tree = schema.to_tree(generating.generate(_OPTIONS, inventory, config))
    return MARK + text_of(tree, "yaml").encode()


def _whose(content: bytes) -> str:
    is_ours = content.startswith(_MARKS)
    return (
        ""
        if is_ours
        else "another program owns it: remove it, or name another file with --cdi-spec"
    )
