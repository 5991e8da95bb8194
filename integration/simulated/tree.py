"""Writing a tree of small files, as procfs and sysfs are."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def write_tree(root: str, files: Mapping[str, str]) -> None:
    """Write files, readable by all.

    Args:
        root: the directory they are below.
        files: contents by path relative to ``root``.
    """
    for path, text in files.items():
        full = os.path.join(root, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "w", encoding="ascii") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o444)


def write_links(root: str, links: Mapping[str, str]) -> None:
    """Make relative links within a tree.

    Args:
        root: the directory the tree is below.
        links: targets by path, both relative to ``root``.
    """
    for path, target in links.items():
        full = os.path.join(root, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        os.symlink(os.path.relpath(os.path.join(root, target), os.path.dirname(full)), full)
