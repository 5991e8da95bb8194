"""The manifest of a tree, as :mod:`integration.tree` reads it."""

from __future__ import annotations

import json
import os
from typing import Any

from integration.tree import FORMAT, MANIFEST, Tree, digest_of, look, read_tree


def write_tree(path: str, *, version: str, revision: str, architecture: str, python: str) -> Tree:
    """Write the manifest of a tree whose files are complete.

    Args:
        version: see :class:`Tree`, as for the others.
    """
    files, programs = look(path)
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": version,
        "revision": revision,
        "architecture": architecture,
        "python": python,
        "digest": digest_of(files, programs),
        "programs": sorted(programs),
        "files": files,
    }
    text = json.dumps(content, indent=1, ensure_ascii=False, sort_keys=False)
    with open(os.path.join(path, MANIFEST), "w", encoding="utf-8") as file:
        file.write(text + "\n")
    return read_tree(path)
