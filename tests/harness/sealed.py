"""The root of a container on a file system that takes no writes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tools.images import Node, unpack


@contextmanager
def sealed(tree: Mapping[str, Node], directory: str) -> Iterator[str]:
    """A directory with the files of an image, for ``ctr run --rootfs``.

    With ``--read-only`` alone the shim can write: only the container's own mount is read-only.

    Args:
        directory: does not exist, and is removed at the end.
    """
    root = unpack(tree, directory)
    try:
        subprocess.run(["mount", "--bind", root, root], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", root], check=True)
            yield root
        finally:
            subprocess.run(["umount", root], check=True)
    finally:
        shutil.rmtree(root)
