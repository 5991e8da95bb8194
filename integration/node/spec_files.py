"""Write the CDI specs of the agent: those of the node (:mod:`.refresh`) and of the device plugin.

Rules
- A spec is replaced in one step if its content changes, and removed if the node has no devices.
- A file of another program is neither replaced nor removed.
- While NVML does not answer (for example during a reset), MIG devices are unknown. So the agent
  keeps the existing spec until NVML answers, as long as all devices and files in it still exist.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from hooks.cdi import files, schema
from hooks.cdi.spec import SpecFile
from hooks.config import Config
from hooks.errors import CdiError
from hooks.node.inventory import Inventory
from integration.cdi.checking import ERROR, check_spec
from integration.files import read_file, remove_file, replace_file

__all__ = ["Whose", "put", "still_true"]

Whose = Callable[[bytes], str]
"""Returns why a file with this content must not be replaced; "" if it may be."""


def still_true(
    path: str, inventory: Inventory, config: Config, whose: Whose
) -> tuple[bytes, SpecFile] | None:
    """Return the existing spec and its text if it must stay while NVML does not answer."""
    if not inventory.nvml_failure:
        return None
    try:
        content = read_file(path)
        if content is None or whose(content):
            return None
        spec = schema.parse(files.tree_of(content, path), path)
    except (OSError, CdiError):
        return None
    gpus = {device.name for device in spec.devices if device.name.startswith("GPU-")}
    gone = gpus.difference(gpu.uuid for gpu in inventory.gpus)
    if gone or any(each.weight == ERROR for each in check_spec(spec, config)):
        return None
    return content, spec


def put(path: str, text: bytes | None, whose: Whose) -> bool:
    """Write or remove a spec; return whether the file changed.

    Args:
        text: the new content; None to remove the file.

    Raises:
        FileExistsError: the file belongs to another program.
        OSError: the file cannot be read, written or removed.
    """
    content = read_file(path)
    if content == text:
        return False
    if content is not None and (why := whose(content)):
        raise FileExistsError(errno.EEXIST, why, path)
    if text is None:
        remove_file(path)
    else:
        replace_file(path, text)
    return True
