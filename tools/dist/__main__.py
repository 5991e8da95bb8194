"""``python -m tools.dist DIRECTORY``: ``make dist``."""

from __future__ import annotations

import argparse
import os
import sys

from integration.tree import Tree
from tools import REPOSITORY
from tools.dist.archive import PROJECT, archive_name, write_tarball
from tools.dist.build import build
from tools.dist.debian import package_name, write_package
from tools.dist.failures import reported
from tools.dist.inputs import Inputs
from tools.stamps import read_stamp, write_stamp


def _hand_on(tree: Tree, inputs: Inputs, directory: str) -> None:
    """Write the archives of a tree, unless they exist; remove this project's other archives."""
    names = (archive_name(tree), package_name(inputs))
    stamp = os.path.join(directory, "archives.of")
    if read_stamp(stamp) == tree.digest and all(
        os.path.exists(os.path.join(directory, name)) for name in names
    ):
        return
    for name in os.listdir(directory):
        if name.startswith(PROJECT) and name.endswith((".deb", ".tar.gz")):
            os.unlink(os.path.join(directory, name))
    write_tarball(tree, os.path.join(directory, names[0]))
    write_package(tree, inputs, os.path.join(directory, names[1]))
    write_stamp(stamp, tree.digest)
    for name in names:
        path = os.path.join(directory, name)
        print(f"{path}: {os.path.getsize(path) / 1e6:.1f} MB")


def main() -> int:
    """Make the tree, its archives and packages; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.dist", description=__doc__)
    parser.add_argument("directory", help="the output directory")
    parser.add_argument("--tree-only", action="store_true", help="make no archives")
    parser.add_argument("--cache", default=os.path.join(REPOSITORY, ".cache", "dist"))
    asked = parser.parse_args()

    def make() -> None:
        inputs = Inputs.of()
        tree = build(os.path.join(asked.directory, "tree"), inputs, cache=asked.cache)
        if not asked.tree_only:
            _hand_on(tree, inputs, asked.directory)

    return reported("dist", asked.directory, make)


if __name__ == "__main__":
    sys.exit(main())
