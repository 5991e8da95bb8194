"""What version of ours a process is of: that of the tree whose files it has mapped.

They are mapped still when the tree has been removed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

from integration.containers.procfs import DELETED, Procfs

# The library that every process of ours has mapped, by its place in a directory of packages.
_MAPPED: Final = "/google/_upb/"
_TREE_NAME: Final = re.compile(r"(\d+\.[\w.+]*\d)(?:-[0-9a-f]{8})?")
_VERSION: Final = re.compile(r'^VERSION = "([^"]+)"', re.MULTILINE)
_DEEPEST: Final = 6  # directories between a tree and that library


@dataclass(frozen=True, slots=True)
class Tree:
    """What a process was started from."""

    path: str  # the installed tree, or the checkout
    version: str  # its version; "" if that cannot be read any more
    is_there: bool  # whether it is there still


def tree_of(procfs: Procfs, pid: int) -> Tree | None:
    """What a process was started from, by what it has mapped.

    Returns:
        The tree, which may have been removed; None if nothing of one is mapped.
    """
    for path in procfs.mapped(pid):
        gone = path.endswith(DELETED)
        inside, found, _ = path.removesuffix(DELETED).partition(_MAPPED)
        if found:
            return _removed_tree(inside) if gone else _tree_above(inside)
    return None


def _tree_above(directory: str) -> Tree | None:
    """The tree that a directory of packages is in: our own are in it, or beside it."""
    for _ in range(_DEEPEST):
        for package in (directory, os.path.join(directory, "lib")):
            version = _version_in(os.path.join(package, "shim/__init__.py"))
            if version:
                is_library = os.path.basename(directory) == "lib"
                top = os.path.dirname(directory) if is_library else directory
                return Tree(top, version, is_there=True)
        directory = os.path.dirname(directory)
    return None


def _version_in(module: str) -> str:
    try:
        with open(module, encoding="utf-8") as file:
            found = _VERSION.search(file.read())
    except (OSError, ValueError):
        return ""
    return found[1] if found else ""


def _removed_tree(packages: str) -> Tree:
    top = os.path.dirname(packages) if os.path.basename(packages) == "lib" else packages
    named = _TREE_NAME.fullmatch(os.path.basename(top))
    return Tree(top, named[1] if named else "", is_there=False)


def is_current(tree: Tree) -> bool | None:
    """Whether a tree is the one that is installed now; None if it is not an installed one."""
    if not tree.is_there:
        return False
    current = os.path.join(os.path.dirname(tree.path), "current")
    if not os.path.islink(current):
        return None
    return os.path.realpath(current) == os.path.realpath(tree.path)
