"""An image with Debian's loaders of OpenCL, Vulkan and EGL, and what they load in it.

Vulkan's loader of the next release is there as well, with that release's glibc.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from tools.gpu.image import PACKAGES, libraries_in
from tools.images import File, Image, compile_program, glibc
from tools.packages import fetch

LOADERS: Final = "nvshim.local/loaders:latest"
LOOK: Final = "LD_DEBUG=files loaders opencl vulkan egl 2>&1 | grep 'calling init.*nvidia'"
"""The script whose output :func:`loaded` reads."""
NEWER_LAYERS: Final = "cd /opt/newer/*; ./ld-linux-*.so.* --library-path . /usr/bin/loaders layers"
"""The script that prints the names of the layers that the newer loader of Vulkan finds."""

_SOURCE: Final = os.path.join(os.path.dirname(__file__), "loaders.c")
_PACKAGES: Final = (
    *PACKAGES, "libdrm2", "libffi8", "libwayland-client0", "libwayland-server0",
    "ocl-icd-libopencl1",
)  # fmt: skip
_NEWER: Final = ("libc6", "libvulkan1")


def loaders() -> Image:
    """Make the image."""
    program = {"usr/bin/loaders": File(compile_program(_SOURCE), 0o755)}
    plain, (debs, newer) = glibc(), _fetch()
    libraries = {**libraries_in(debs), **libraries_in(newer, "opt/newer")}
    return replace(plain, name=LOADERS, tree={**plain.tree, **libraries, **program})


def _fetch(say: Callable[[str], None] | None = None) -> tuple[list[str], list[str]]:
    return fetch(_PACKAGES, say=say), fetch(_NEWER, release="trixie", say=say)


def loaded(output: str) -> set[str]:
    """Return the names, up to ``.so``, of the driver's libraries that were loaded."""
    return set(re.findall(r"calling init: \S+/([\w-]+)\.so", output))


if __name__ == "__main__":
    _fetch(say=print)
