"""CDI specs that the agent keeps: the node's (:mod:`.refresh`), and the device plugin's.

Rules
- One is written, in one step, if it would differ, and removed when there is nothing to say.
- A file that is somebody else's is neither replaced nor removed.
- NVML that does not answer, as in the middle of a reset, takes no devices away: without it MIG
  devices are unknown. So a spec of which everything is there still stays until NVML answers.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING

from hooks.cdi import files, schema
from hooks.errors import CdiError
from integration.cdi.checking import ERROR, check_spec
from integration.files import read_file, remove_file, replace_file

if TYPE_CHECKING:
    from hooks.cdi.spec import SpecFile
    from hooks.config import Config
    from hooks.node.inventory import Inventory

__all__ = ["Whose", "put", "still_true"]

Whose = Callable[[bytes], str]
"""Says of a file's content what keeps it from being replaced; "" for nothing."""


def still_true(
    path: str, inventory: Inventory, config: Config, whose: Whose
) -> tuple[bytes, SpecFile] | None:
    """The spec that is there, and its text, if it is to stay as it is."""
    if not inventory.nvml_failure:
        return None
    try:
        there = read_file(path)
        if there is None or whose(there):
            return None
        spec = schema.parse(files.tree_of(there, path), path)
    except (OSError, CdiError):
        return None
    gpus = {device.name for device in spec.devices if device.name.startswith("GPU-")}
    gone = gpus.difference(gpu.uuid for gpu in inventory.gpus)
    if gone or any(each.weight == ERROR for each in check_spec(spec, config)):
        return None
    return there, spec


def put(path: str, text: bytes | None, whose: Whose) -> bool:
    """Write a spec, or remove it; whether that was needed.

    Raises:
        FileExistsError: the file there is somebody else's.
        OSError: it could not be done.
    """
    there = read_file(path)
    if there == text:
        return False
    if there is not None and (why := whose(there)):
        raise FileExistsError(errno.EEXIST, why, path)
    if text is None:
        remove_file(path)
    else:
        replace_file(path, text)
    return True
