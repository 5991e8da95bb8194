"""One look at the node, and what is kept true by it: the inventory, the CDI spec, nodes and links.

Rules
- The shim looks for itself when a container is made, and needs nothing of what is kept here. The
  inventory spares its next container the question to NVML; the CDI spec is for runtimes that are
  not ours (Podman, CRI-O, Docker's ``--device``).
- The spec is written when it would differ, in one step. When there is no driver any more it is
  removed: a spec of what is not there fails containers that could say why.
- Only a file that we have made is replaced or removed; its first line says so. So does that of the
  unit that makes a spec where no agent runs.
- While the driver is out of service nobody is asked, and what was kept counts if it is still true.
- What is wrong with the node is an answer, not the end of the agent.
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
"""The first line of the spec; without it, a file is somebody else's."""

MARK_OF_UNIT: Final = b"# Made by nvshim-cdi-refresh.service, until nvshim node replaces it.\n"
"""The first line of a spec that ``integration/systemd/nvshim-cdi-refresh.service`` has made."""

_MARKS: Final = (MARK, MARK_OF_UNIT)

# So many looks in a row that nothing gave a reason for go by what an earlier one has made.
_TRUSTED: Final = 10

_WISH: Final = generating.SpecOptions(
    kind="gpu",
    vendor="",
    class_="",
    directories=(),
    annotations=(),
    strategies=("index", "uuid"),
    capabilities=generating.DEFAULT_CAPABILITIES,
)


class Made:
    """The text of a spec as it was made for a node, which is the same for the same node.

    To make it takes half a second for a hundred MIG devices. It is made anew when something was
    heard, when the inventory is another, and now and then all the same: the net below both.
    """

    def __init__(self) -> None:
        self._inventory: Inventory | None = None
        self._text = b""
        self._used = 0

    def text(self, inventory: Inventory, config: Config, *, heard: bool) -> bytes:
        """The text."""
        self._used += 1
        if heard or self._used >= _TRUSTED or inventory != self._inventory:
            self._text = _text(inventory, config)
            self._inventory, self._used = inventory, 0
        return self._text


def look(config: Config, *, heard: bool = False, anew: bool = False) -> NodeSnapshot:
    """Look at the node.

    Args:
        heard: something has changed, so that NVML is asked again even if it has just failed.
        anew: NVML is asked, whatever was kept.

    Returns:
        What was seen, without a spec. Whatever is wrong is one of its faults.
    """
    try:
        if why := driver_of(read_drains(config)):
            # Whoever asks NVML, or makes a node, has the driver loaded again.
            return NodeSnapshot(load_inventory(config), (f"the driver is out of service {why}",))
        inventory = inventory_of(config, confirmed=heard, anew=anew)
    except NvshimError as error:
        return NodeSnapshot(faults=(str(error),))
    unanswered = [f"NVML: {inventory.nvml_failure}"] if inventory.nvml_failure else []
    return NodeSnapshot(inventory, (*unanswered, *inventory.notes))


def keep_spec(
    config: Config, spec: str, seen: NodeSnapshot, *, heard: bool, made: Made
) -> NodeSnapshot:
    """Bring the spec up to date.

    Args:
        spec: the path of the CDI spec; "" for none.

    Returns:
        What was seen, with the spec. What is wrong with that is one of its faults.
    """
    if not spec:
        return seen
    inventory, faults = seen.inventory, list(seen.faults)
    text: bytes | None = None
    try:
        if inventory is not None:
            kept = still_true(spec, inventory, config, _whose)
            text = kept[0] if kept else made.text(inventory, config, heard=heard)
    except NvshimError as error:
        faults.insert(0, str(error))
    written = False
    try:
        written = put(spec, text, _whose)
    except OSError as error:
        faults.insert(0, f"{error.filename or spec}: {error.strerror}")
    return replace(
        seen,
        spec=spec if text is not None and os.path.exists(spec) else "",
        written=written,
        faults=tuple(faults),
    )


def _text(inventory: Inventory, config: Config) -> bytes:
    tree = schema.to_tree(generating.generate(_WISH, inventory, config))
    return MARK + text_of(tree, "yaml").encode()


def _whose(content: bytes) -> str:
    is_ours = content.startswith(_MARKS)
    return "" if is_ours else "is not ours: remove it, or name another with --cdi-spec"
