"""What a bundle is made of, as containerd makes it: an unpacked image, and a spec."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache

from tools.images import Link, Node, unpack


def lay_out(tree: Mapping[str, Node], rootfs: str) -> None:
    """Unpack an image. Programs that are links to busybox become its names, which cost a tenth."""
    applets = {path for path, node in tree.items() if node == Link("busybox")}
    unpack({path: node for path, node in tree.items() if path not in applets}, rootfs)
    for path in applets:
        place = os.path.join(rootfs, path)
        os.link(os.path.join(os.path.dirname(place), "busybox"), place)


@cache
def plain_spec() -> bytes:
    """The spec that runc writes."""
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(["runc", "spec", "--bundle", directory], check=True)
        with open(f"{directory}/config.json", "rb") as file:
            return file.read()
