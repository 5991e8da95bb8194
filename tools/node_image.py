"""The image of both DaemonSets, without a daemon, a registry or root: ``make image``.

It is the tree of ``make dist``, and nothing else: no shell, no distribution. The tree has its own
interpreter and libraries, and the copy that is installed on the node does the work there.
"""

from __future__ import annotations

import sys
from typing import Final

from shim import VERSION
from tools.images import Image, tree_of, write_archive

__all__ = ["IMAGE", "NAME", "node_image"]

NAME: Final = "containerd-shim-nvidia"
# containerd takes a name without a registry for Docker Hub, so the name is complete.
IMAGE: Final = f"docker.io/library/{NAME}:{VERSION}"


def node_image(tree: str) -> Image:
    """Return the image of a self-contained tree.

    Raises:
        ImageBuildFailed: it does not exist, or contains anything but files, links and directories.
    """
    return Image(
        IMAGE,
        tree_of(tree, "nvshim"),
        environment={"PATH": "/nvshim/bin"},
        entrypoint=("/nvshim/bin/nvshim",),
        command=("node-installer",),
        labels={
            "org.opencontainers.image.title": NAME,
            "org.opencontainers.image.licenses": "Apache-2.0",
        },
    )


if __name__ == "__main__":
    _tree, _archive = sys.argv[1:3]
    print(write_archive(_archive, [node_image(_tree)]), IMAGE)
