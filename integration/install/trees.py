"""Read the trees below a prefix, and find the one that this program is part of."""

from __future__ import annotations

from integration import tree as manifest
from integration.errors import TreeError
from integration.install.errors import SourceMissing
from integration.tree import Tree


def known_tree(path: str) -> Tree | None:
    """Return the description of a tree; None if the directory is not a valid tree."""
    try:
        return manifest.read_tree(path)
    except TreeError:
        return None


def problem_of(path: str, only: str = "") -> str:
    """Return what is wrong with the files of a tree, in one line; "" if nothing is wrong.

    Args:
        path: the tree's directory.
        only: verify only a tree with this digest; empty for any.
    """
    try:
        if not only or manifest.read_tree(path).digest == only:
            manifest.verify(path)
    except TreeError as error:
        return error.found
    return ""


def own_tree() -> str:
    """Return the directory of the tree that this program is part of.

    Raises:
        SourceMissing: the program is not part of a tree, for example in a checkout.
    """
    path = manifest.own_tree()
    if not path:
        raise SourceMissing(
            "to install the tree that this nvshim is part of",
            found="it is not part of a tree",
            do="build one with make dist, and name it with --from",
        )
    return path
