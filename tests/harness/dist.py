"""Build the self-contained tree of this checkout once for all tests, and cache it for later runs.

``python -m tests.harness.dist`` builds it before a test's time is measured.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from dataclasses import replace
from typing import Final

from integration.tree import Tree
from tools import REPOSITORY
from tools.dist.build import build
from tools.dist.inputs import Inputs
from tools.dist.interpreter import Packages
from tools.dist.manifest import write_tree
from tools.dist.payload import link_or_copy

CACHE: Final = os.path.join(REPOSITORY, ".cache", "dist")
_TREES: Final = os.path.join(CACHE, "trees")

# Seconds after which a tree that no test run has used is removed.
_KEPT: Final = 6 * 3600


def inputs() -> Inputs:
    """Return the inputs of the tree of tests, which depend on the sources and on no commit."""
    return replace(Inputs.of(), revision="tested", epoch=1_700_000_000, released=False)


def built() -> Tree:
    """Build the tree, or return the cached one. Tests share it and must not change it.

    Raises:
        NvshimError: the tree could not be built.
    """
    made_of = inputs()
    name = made_of.fingerprint(Packages.have().roots)[:16]
    os.makedirs(_TREES, exist_ok=True)
    lock = os.open(_TREES, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        directory = os.path.join(_TREES, name)
        tree = build(os.path.join(directory, "tree"), made_of, cache=CACHE)
        os.utime(directory)
        for other in os.listdir(_TREES):
            path = os.path.join(_TREES, other)
            if other != name and time.time() - os.stat(path).st_mtime > _KEPT:
                shutil.rmtree(path)
    finally:
        os.close(lock)
    return tree


def copied(tree: Tree, path: str, *, revision: str = "") -> Tree:
    """Copy a tree to another place, with hard links where the file system allows them.

    Args:
        path: where the copy is created.
        revision: the copy's revision, if it needs another digest.
    """
    shutil.copytree(tree.path, path, symlinks=True, copy_function=link_or_copy)
    if not revision:
        return replace(tree, path=path)
    program = os.path.join(path, "bin", "containerd-shim-nvidia-v1.py")
    with open(program, encoding="utf-8") as file:
        text = file.read()
    assert tree.revision in text
    _write(program, text.replace(tree.revision, revision))
    os.unlink(os.path.join(path, "tree.json"))
    return write_tree(
        path, version=tree.version, revision=revision, architecture=tree.architecture,
        python=tree.python,
    )  # fmt: skip


def _write(path: str, text: str) -> None:
    """Replace a file. The old one may be a hard link that another tree uses, too."""
    os.unlink(path)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    built()
