"""Create an image with Python, strace and the loaders of OpenGL, EGL and Vulkan."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from typing import Final

from integration.simulated.images import skeleton, unpack
from integration.simulated.packages import default_cache
from tools.images import Image, tree_of
from tools.packages import fetch

__all__ = ["IMAGE", "PYTHON", "make_image"]

IMAGE: Final = "nvshim.local/packages:latest"
RELEASE: Final = "bookworm"
PYTHON: Final = "3.11"
"""The version of Python in that release, which selects wheels."""

# Without their dependencies: Mesa and LLVM are large, and not used.
_PACKAGES: Final = (
    "busybox-static", "libatomic1", "libbsd0", "libbz2-1.0", "libc-bin", "libc6", "libcrypt1",
    "libdrm2",
    "libegl1", "libexpat1", "libffi8", "libgbm1", "libgcc-s1", "libgl1", "libglvnd0", "libglx0",
    "liblzma5", "libmd0", "libopengl0", "libpython3.11-minimal", "libpython3.11-stdlib",
    "libsqlite3-0", "libssl3", "libstdc++6", "libtinfo6", "libncursesw6", "libunwind8", "libuuid1",
    "libvulkan1", "libwayland-client0", "libwayland-server0", "libx11-6", "libxau6", "libxcb1",
    "libxdmcp6", "libxext6", "python3.11", "python3.11-minimal", "strace", "zlib1g",
)  # fmt: skip
_LOADER_CACHE: Final = "etc/ld.so.cache"


def make_image() -> Image:
    """Download missing packages, and unpack all of them as an image.

    Raises:
        PackagesError: a package cannot be downloaded.
        ImageBuildFailed: a package has a file that an image cannot have.
    """
    debs = fetch(
        _PACKAGES, os.path.join(default_cache(), f"{RELEASE}-packages"), release=RELEASE, say=print
    )
    with tempfile.TemporaryDirectory(prefix="nvshim-root-", dir=default_cache()) as directory:
        root = unpack(skeleton(), os.path.join(directory, "root"))
        for deb in debs:
            _extract(deb, root)
        shutil.rmtree(os.path.join(root, "usr/share/doc"), ignore_errors=True)
        subprocess.run(["ldconfig", "-r", root], check=True)
        os.symlink(f"python{PYTHON}", os.path.join(root, "usr/bin/python3"))
        os.symlink("busybox", os.path.join(root, "usr/bin/sh"))
        return Image(IMAGE, tree_of(root))


def _extract(deb: str, root: str) -> None:
    """Unpack a package over the links of a merged /usr."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE) as content:
        argv = ["tar", "-x", "--keep-directory-symlink", "-C", root]
        subprocess.run(argv, stdin=content.stdout, check=True)
    if content.returncode:
        raise subprocess.CalledProcessError(content.returncode, content.args)
