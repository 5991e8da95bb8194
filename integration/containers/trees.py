"""Find the version of this project that a process runs, from the tree whose files it has mapped.

The files stay mapped even after the tree is removed.
"""

from __future__ import annotations

import os
import re
from typing import Final

from api.values import dataclass
from integration.containers.procfs import DELETED, Procfs
from integration.files import read_some
from shim.mountinfo import leads_below, served_mount_points

# A library that each of our processes has mapped, by its place below a directory of packages.
_MAPPED: Final = "/google/_upb/"
_TREE_NAME: Final = re.compile(r"(\d+\.[\w.+]*\d)(?:-[0-9a-f]{8})?")
_VERSION: Final = re.compile(rb'^VERSION = "([^"]+)"', re.MULTILINE)
_LONGEST_MODULE: Final = 1 << 16
_DEEPEST: Final = 6  # directories between a tree and that library


@dataclass(frozen=True, slots=True)
class Tree:
    """The tree that a process was started from."""

    path: str  # the installed tree, or the checkout
    version: str  # its version; "" if it cannot be read
    is_there: bool  # whether it still exists


def tree_of(procfs: Procfs, pid: int) -> Tree | None:
    """Return the tree that a process was started from, removed or not; None if none is mapped."""
    for path in procfs.mapped(pid):
        is_removed = path.endswith(DELETED)
        packages, found, _ = path.removesuffix(DELETED).partition(_MAPPED)
        if found and (is_removed or not procfs.is_local(packages)):
            return _tree_by_name(packages, is_there=not is_removed)
        if found:
            return _tree_above(packages)
    return None


def _tree_above(directory: str) -> Tree | None:
    """Return the tree of a directory of packages: it contains ours, or is next to them."""
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
        found = _VERSION.search(read_some(module, _LONGEST_MODULE))
    except OSError:
        return ""
    return found[1].decode(errors="replace") if found else ""


def _tree_by_name(packages: str, *, is_there: bool) -> Tree:
    """Return a tree whose files cannot be read: it was removed, or another machine serves it."""
    top = os.path.dirname(packages) if os.path.basename(packages) == "lib" else packages
    named = _TREE_NAME.fullmatch(os.path.basename(top))
    return Tree(top, named[1] if named else "", is_there=is_there)


def is_current(tree: Tree) -> bool | None:
    """Whether a tree is the installed one.

    None if it is not below a directory of trees, or if another machine or process serves it.
    """
    if not tree.is_there:
        return False
    current = os.path.join(os.path.dirname(tree.path), "current")
    served = served_mount_points()
    if any(leads_below(path, served, set()) for path in (tree.path, current)):
        return None
    if not os.path.islink(current):
        return None
    return os.path.realpath(current) == os.path.realpath(tree.path)
