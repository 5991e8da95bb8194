"""The trees below a prefix, and the one that this program is part of."""

from __future__ import annotations

from integration import tree as manifest
from integration.errors import TreeError
from integration.install.errors import SourceMissing
from integration.tree import Tree


def known_tree(path: str) -> Tree | None:
    """What a directory says of itself; None if it is no tree, or one whose list is lost."""
    try:
        return manifest.read_tree(path)
    except TreeError:
        return None


def problem_of(path: str, only: str = "") -> str:
    """What is wrong with the files of a tree, in one line; empty if nothing is.

    Args:
        path: its directory.
        only: the digest of the tree that is of interest; of others nothing is looked at.
    """
    try:
        if not only or manifest.read_tree(path).digest == only:
            manifest.verify(path)
    except TreeError as error:
        return error.found
    return ""


def own_tree() -> str:
    """The directory of the tree that this program is part of.

    Raises:
        SourceMissing: it is part of none, as in a checkout.
    """
    path = manifest.own_tree()
    if not path:
        raise SourceMissing(
            "to install the tree that this nvshim is part of",
            found="it is part of none",
            do="build one with make dist, and name it with --from",
        )
    return path
