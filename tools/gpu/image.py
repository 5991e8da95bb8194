"""The image of the checks' containers: glibc, test programs, graphics loaders.

Images, and not drivers, contain the loaders of Vulkan and EGL; NVIDIA's graphics libraries are
linked with those of X11. They come from Debian packages, which are unpacked and not installed.

Source: the packages' lists of files; Vulkan-Loader docs/LoaderDriverInterface.md.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from typing import Final

from integration.simulated.packages import fetch, unpack
from tools.gpu.containers import IMAGE
from tools.images import File, Image, Tree, compile_program, glibc, tree_of

PROGRAM: Final = "usr/bin/gpu"

_SOURCE: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gpu.c")
PACKAGES: Final = (
    "libegl1", "libgl1", "libglvnd0", "libglx0", "libvulkan1", "libx11-6", "libxext6", "libxcb1",
    "libxau6", "libxdmcp6", "libbsd0", "libmd0",
)  # fmt: skip
"""The packages with loaders of Vulkan and EGL, and with dependencies of NVIDIA's libraries."""


def gpu_image(packages: str | None = None) -> Image:
    """Return the image.

    Args:
        packages: the cache of packages; that of :func:`default_cache` if None.

    Raises:
        PackagesError: a package cannot be downloaded.
        SourceNotInstalled: a program, a library or the compiler is missing.
        ImageBuildFailed: the compiler or ldconfig failed.
    """
    tree: Tree = dict(glibc().tree)
    tree.update(libraries_of(PACKAGES, packages))
    tree[PROGRAM] = File(compile_program(_SOURCE), 0o755)
    return Image(IMAGE, tree)


def libraries_of(names: Iterable[str], packages: str | None = None) -> Tree:
    """Return the shared libraries in packages.

    Args:
        packages: the cache of packages; that of :func:`default_cache` if None.

    Raises:
        PackagesError: a package cannot be downloaded.
    """
    return libraries_in(fetch(names, packages))


def libraries_in(debs: Sequence[str], place: str = "usr/lib") -> Tree:
    """The shared libraries in files of packages.

    Args:
        place: where in the image they are.
    """
    with tempfile.TemporaryDirectory(prefix="nvshim-image-") as work:
        root = os.path.join(work, "root")
        unpack(debs, root)
        tree = tree_of(os.path.join(root, "usr/lib"), place)
    return {path: node for path, node in tree.items() if ".so." in path}
