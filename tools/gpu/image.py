"""The image of the containers that prove things: glibc, test programs, loaders of graphics.

Vulkan and EGL are reached through loaders that images bring, not drivers; NVIDIA's libraries of
graphics are linked with those of X11. They come from Debian's packages, unpacked and not installed.

Source: the packages' lists of files; Vulkan-Loader docs/LoaderDriverInterface.md.
"""

from __future__ import annotations

import os
import tempfile
from typing import Final

from integration.simulated.packages import fetch, unpack
from tools.gpu.containers import IMAGE
from tools.images import File, Image, Tree, compile_program, glibc, tree_of

PROGRAM: Final = "usr/bin/gpu"

_SOURCE: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gpu.c")
_PACKAGES: Final = (
    "libegl1", "libgl1", "libglvnd0", "libglx0", "libvulkan1", "libx11-6", "libxext6", "libxcb1",
    "libxau6", "libxdmcp6", "libbsd0", "libmd0",
)  # fmt: skip


def gpu_image(packages: str | None = None) -> Image:
    """The image.

    Args:
        packages: the cache of packages; that of :func:`default_cache` if None.

    Raises:
        PackagesError: a package cannot be had.
        SourceNotInstalled: a program, a library or the compiler is missing.
        ImageBuildFailed: the compiler or ldconfig failed.
    """
    tree: Tree = dict(glibc().tree)
    tree.update(_loaders(packages))
    tree[PROGRAM] = File(compile_program(_SOURCE), 0o755)
    return Image(IMAGE, tree)


def _loaders(packages: str | None) -> Tree:
    debs = fetch(_PACKAGES, packages)
    with tempfile.TemporaryDirectory(prefix="nvshim-image-") as work:
        root = os.path.join(work, "root")
        unpack(debs, root)
        tree = tree_of(os.path.join(root, "usr/lib"), "usr/lib")
    return {path: node for path, node in tree.items() if ".so." in path}
