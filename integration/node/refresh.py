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
from dataclasses import dataclass, replace
from typing import Any, Final

from api.errors import NvshimError
from hooks.cdi import generating, schema
from hooks.config import Config
from hooks.node.drained import driver_of, read_drains
from hooks.node.inventory import Inventory, load_inventory
from hooks.sharing import by_name
from integration.cdi.writing import text_of
from integration.inventory import inventory_of
from integration.node.spec_files import put, still_true

MARK: Final = b"# Made by nvshim node, which replaces it when the node changes.\n"
"""The first line of the spec; without it, a file is somebody else's."""

MARK_OF_UNIT: Final = b"# Made by nvshim-cdi-refresh.service, until nvshim node replaces it.\n"
"""The first line of a spec that ``integration/systemd/nvshim-cdi-refresh.service`` has made."""

_MARKS: Final = (MARK, MARK_OF_UNIT)

# So many looks in a row that nothing gave a reason for go by what an earlier one has made.
_TRUSTED: Final = 10

_WISH: Final = generating.Wish(
    kind="gpu",
    vendor="",
    class_="",
    directories=(),
    annotations=(),
    strategies=("index", "uuid"),
    capabilities=generating.DEFAULT_CAPABILITIES,
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the node was like at one look."""

    inventory: Inventory | None = None  # what the node has; None if that could not be told
    faults: tuple[str, ...] = ()  # what is wrong, a line each
    spec: str = ""  # the path of the CDI spec; "" if there is none
    written: bool = False  # whether the spec was written or removed this time

    @property
    def driver(self) -> str:
        """Its version; "" if there is none."""
        return "" if self.inventory is None else self.inventory.driver.version

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the GPUs."""
        inventory = self.inventory
        return () if inventory is None else tuple(gpu.uuid for gpu in inventory.gpus)

    @property
    def mig_devices(self) -> tuple[str, ...]:
        """UUIDs of the MIG devices."""
        inventory = self.inventory
        return () if inventory is None else tuple(each.uuid for each in inventory.mig_devices)

    @property
    def drained(self) -> dict[str, str]:
        """Since when and why each GPU and MIG device that is out of service is so, by UUID."""
        inventory = self.inventory
        if inventory is None:
            return {}
        whole = inventory.drained and f"with the driver, {inventory.drained}"
        devices = by_name(inventory.mig_devices, inventory.gpus).items()
        return {name: why for name, each in devices if (why := each.drained or whole)}

    def as_document(self) -> dict[str, Any]:
        """For the agent's status file and its log."""
        return {
            "driver": self.driver,
            "gpus": list(self.gpus),
            "migDevices": list(self.mig_devices),
            "cdiSpec": self.spec,
            "outOfService": self.drained,
            "faults": list(self.faults),
        }


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


def look(config: Config, *, heard: bool = False, anew: bool = False) -> Seen:
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
            return Seen(load_inventory(config), (f"the driver is out of service {why}",))
        inventory = inventory_of(config, confirmed=heard, anew=anew)
    except NvshimError as error:
        return Seen(faults=(str(error),))
    unanswered = [f"NVML: {inventory.nvml_failure}"] if inventory.nvml_failure else []
    return Seen(inventory, (*unanswered, *inventory.notes))


def keep_spec(config: Config, spec: str, seen: Seen, *, heard: bool, made: Made) -> Seen:
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
