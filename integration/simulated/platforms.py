"""Build nodes without NVIDIA's usual driver: a Jetson, and WSL2.

    platform = "tegra"            # or "wsl"

The files are where a Jetson's packages and Windows put them; their contents are Debian's driver for
this machine's architecture. Neither platform has /proc/driver/nvidia or NVML.

Source: file lists of the nvidia-l4t packages of JetPack 6, its lists of host files for
containers; a driver store of Windows as WSL2 shows it.
"""

from __future__ import annotations

import os
import shutil
from typing import Final

from integration.simulated.driver import DriverFiles
from integration.simulated.library import build_stand_in
from integration.simulated.scenario import TEGRA
from integration.simulated.tree import (
    DRM_MAJOR,
    FIRST_RENDER,
    MISC_MAJOR,
    Device,
    NodeTree,
    video_group,
)

LISTS: Final = "etc/nvidia-container-runtime/host-files-for-container.d"
STORE: Final = "usr/lib/wsl/drivers/nv_dispi.inf_amd64_0123456789abcdef"

_DXG_MINOR: Final = 127
_NVMAP_MINOR: Final = 121

# Libraries by their names on the platform, and their names in Debian's packages ({v}: version).
_TEGRA_LIBRARIES: Final = {
    "libcuda.so.1.1": "libcuda.so.{v}",
    "libnvidia-ptxjitcompiler.so.540.4.0": "libnvidia-ptxjitcompiler.so.{v}",
}
_WSL_LIBRARIES: Final = {
    "libcuda.so.1.1": "libcuda.so.{v}",
    "libnvidia-ml.so.1": "libnvidia-ml.so.{v}",
    "libnvidia-ptxjitcompiler.so.1": "libnvidia-ptxjitcompiler.so.{v}",
    "libnvcuvid.so.1": "libnvcuvid.so.{v}",
}
_WSL_STAND_INS: Final = (
    "libcuda_loader.so", "libnvidia-ml_loader.so", "libnvdxgdmal.so.1", "libnvdxdlkernels.so",
)  # fmt: skip

_TEGRA_LISTS: Final = {
    "devices.csv": """\
# Nodes of the GPU
dev, /dev/nvmap
dev , /dev/nvhost-gpu
dev, nvhost-ctrl-gpu
dev, /dev/nvgpu/igpu[0-9]/*
dev, /dev/dri/renderD*
dev, /dev/no-such-node
""",
    "drivers.csv": """\
lib, /usr/lib/{triplet}/nvidia/libcuda.so.1.1
sym, /usr/lib/{triplet}/libcuda.so

lib, /usr/lib/{triplet}/nvidia/libnvidia-ptxjitcompiler.so.*
sym, /usr/lib/{triplet}/nvidia/libnvidia-ptxjitcompiler.so.1
dir, /lib/firmware/tegra23x
lib, /usr/share/doc/no-such-package/LICENSE
not a line of any form
""",
    "cuda.csv": """\
dir, /usr/local/cuda-12.6
sym, /usr/local/cuda
""",
}


def make_platform(platform: str, directory: str, tree: NodeTree, files: DriverFiles) -> None:
    """Create a platform's files, on a node without NVIDIA's usual driver.

    Args:
        platform: "tegra" or "wsl".
        directory: the node's directory; libraries go into its driver root.
        tree: receives everything else.

    Raises:
        LibraryNotBuilt: there is no compiler for the stand-ins.
    """
    make = _make_tegra if platform == TEGRA else _make_wsl
    make(os.path.join(directory, "driver"), tree, files)


def _make_tegra(root: str, tree: NodeTree, files: DriverFiles) -> None:
    own = f"usr/lib/{files.triplet}/nvidia"
    _copy_libraries(os.path.join(root, own), files, _TEGRA_LIBRARIES)
    for name, text in _TEGRA_LISTS.items():
        tree.files[f"driver/{LISTS}/{name}"] = text.format(triplet=files.triplet)
    tree.files |= {
        "driver/etc/nv_tegra_release": "# R36 (release), REVISION: 4.0, GCID: 1, BOARD: generic\n",
        "driver/lib/firmware/tegra23x/nvhost_nvdec050.fw": "firmware\n",
        "driver/usr/local/cuda-12.6/version.json": "{}\n",
        "sys/devices/soc0/family": "Tegra\n",
    }
    for link, target in {
        f"{own}/libcuda.so.1": "libcuda.so.1.1",
        f"{own}/libcuda.so": "libcuda.so.1",
        f"usr/lib/{files.triplet}/libcuda.so": "nvidia/libcuda.so",
        f"{own}/libnvidia-ptxjitcompiler.so.1": "libnvidia-ptxjitcompiler.so.540.4.0",
        "etc/alternatives/cuda": "/usr/local/cuda-12.6",
        "usr/local/cuda": "/etc/alternatives/cuda",
    }.items():
        os.makedirs(os.path.dirname(os.path.join(root, link)), exist_ok=True)
        os.symlink(target, os.path.join(root, link))
    gpu, ctrl = tree.free_major(), tree.free_major()
    tree.devices += [
        Device(path, major, minor, 0o660, video_group())
        for path, major, minor in (
            ("nvmap", MISC_MAJOR, _NVMAP_MINOR),
            ("nvhost-gpu", gpu, 0),
            ("nvhost-ctrl-gpu", gpu, 1),
            ("nvgpu/igpu0/ctrl", ctrl, 0),
            ("nvgpu/igpu0/as", ctrl, 1),
            ("nvhost-vic", gpu, 9),  # not listed
            ("dri/renderD128", DRM_MAJOR, FIRST_RENDER),
        )
    ]


def _make_wsl(root: str, tree: NodeTree, files: DriverFiles) -> None:
    store = os.path.join(root, STORE)
    _copy_libraries(store, files, _WSL_LIBRARIES)
    for name in _WSL_STAND_INS:
        build_stand_in(os.path.join(store, name), name)
    own = os.path.join(root, "usr/lib/wsl/lib")
    os.makedirs(own)
    build_stand_in(os.path.join(own, "libdxcore.so"), "libdxcore.so")
    shutil.copyfile(os.path.join(store, "libcuda_loader.so"), os.path.join(own, "libcuda.so.1.1"))
    smi = os.path.join(store, "nvidia-smi")
    with open(smi, "w", encoding="ascii") as file:
        file.write('#!/bin/sh\necho "nvidia-smi of Windows"\n')
    os.chmod(smi, 0o755)  # noqa: S103 - a program
    tree.files |= {
        f"driver/{STORE}/nvcubins.bin": "cubins\n",
        f"driver/{STORE}/nv_dispi.inf": "inf\n",
        "sys/class/misc/dxg/dev": f"{MISC_MAJOR}:{_DXG_MINOR}\n",
    }
    tree.devices.append(Device("dxg", MISC_MAJOR, _DXG_MINOR))


def _copy_libraries(directory: str, files: DriverFiles, names: dict[str, str]) -> None:
    source = os.path.join(files.directory, "usr/lib", files.triplet, "nvidia/current")
    os.makedirs(directory)
    for name, packaged in names.items():
        library = os.path.join(source, packaged.format(v=files.version))
        shutil.copyfile(library, os.path.join(directory, name))
