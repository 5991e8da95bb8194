"""Spec files in YAML, kept in JSON: PyYAML takes longer to load than a container to be planned.

``STATE/cdi/DEVICE-INODE-SIZE-MTIME-CTIME.json`` has the spec that was read from the file with that
identity. Root alone can write a spec file, and ctime cannot be set back, so a file of the same
identity has the same content.

Rules
- What was changed in the last seconds is not kept: it may change again within the clock's
  grain.
- A kept file is read with the same care as any other, and checked by the same rules; one that is
  not as it should be does not count.
- Nothing is an error here. What cannot be kept is read again.
- The most that are kept is a handful: what else is in the directory goes, the oldest first.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Final

from hooks.cdi import files, schema
from hooks.cdi.errors import CdiFileUnusable, CdiSpecInvalid

if TYPE_CHECKING:
    from hooks.cdi.files import Content
    from hooks.cdi.spec import SpecFile

__all__ = ["load", "store"]

DIRECTORY: Final = "cdi"
_SETTLED: Final = 2.0
_MOST: Final = 32


def load(state: str, content: Content, path: str) -> SpecFile | None:
    """The spec that was kept for a file.

    Args:
        state: the state directory.
        content: of the file.
        path: of the file, for messages.

    Returns:
        The spec; None if none is kept that can be used.
    """
    try:
        kept = files.read(_place(state, content))
        return None if kept is None else schema.parse(json.loads(kept.data), path)
    except (CdiFileUnusable, CdiSpecInvalid, ValueError, RecursionError):
        return None


def store(state: str, content: Content, spec: SpecFile) -> None:
    """Keeps the spec that was read from a file.

    Args:
        state: the state directory; it is made if it is not there.
        content: of the file.
        spec: what it says.
    """
    if not 0 <= content.changed <= time.time() - _SETTLED:
        return
    directory = os.path.join(state, DIRECTORY)
    aside = f"{directory}/.{os.getpid()}-{os.urandom(6).hex()}"
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(schema.to_tree(spec), file, separators=(",", ":"))
        os.rename(aside, _place(state, content))
        _prune(directory)
    except OSError:
        return


def _place(state: str, content: Content) -> str:
    return os.path.join(state, DIRECTORY, "-".join(map(str, content.identity)) + ".json")


def _prune(directory: str) -> None:
    with os.scandir(directory) as entries:
        aged = sorted((entry.stat(follow_symlinks=False).st_mtime, entry.path) for entry in entries)
    for _, path in aged[:-_MOST]:
        os.unlink(path)
