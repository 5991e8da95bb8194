"""Nodes on which NVIDIA's driver is not the usual one: a Jetson, and Linux in Windows.

    platform = "tegra"            # or "wsl"

Their files are where a Jetson's packages and Windows put them; what is in them is Debian's driver
for this machine, whatever its architecture is. Neither has /proc/driver/nvidia or NVML.

Source: file lists of the nvidia-l4t packages of JetPack 6, its lists of host files for
containers; a driver store of Windows as WSL2 shows it.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Final

from integration.simulated.devices import DRM_MAJOR, Node, free_majors, group_of, make_nodes
from integration.simulated.library import build_stand_in
from integration.simulated.tree import write_tree

if TYPE_CHECKING:
    from integration.simulated.driver import DriverFiles

TEGRA: Final = "tegra"
WSL: Final = "wsl"
PLATFORMS: Final = (TEGRA, WSL)

LISTS: Final = "etc/nvidia-container-runtime/host-files-for-container.d"
STORE: Final = "usr/lib/wsl/drivers/nv_dispi.inf_amd64_0123456789abcdef"

_MISC_MAJOR: Final = 10
_DXG_MINOR: Final = 127
_NVMAP_MINOR: Final = 121

# Libraries by their names on the platform, and what Debian's packages call them ({v}: version).
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
_WSL_STAND_INS: Final = {
    "libcuda_loader.so": "libcuda_loader.so",
    "libnvidia-ml_loader.so": "libnvidia-ml_loader.so",
    "libnvdxgdmal.so.1": "libnvdxgdmal.so.1",
    "libnvdxdlkernels.so": "libnvdxdlkernels.so",
}

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


def make_platform(platform: str, directory: str, files: DriverFiles) -> None:
    """Make what a platform has, on a node that has nothing else of NVIDIA's.

    Args:
        platform: one of :data:`PLATFORMS`.
        directory: the node's, with its roots.
        files: the driver's packages.

    Raises:
        LibraryNotBuilt: no compiler for the stand-ins.
        DevicesForbidden: device nodes cannot be made there.
    """
    {TEGRA: _make_tegra, WSL: _make_wsl}[platform](directory, files)


def _make_tegra(directory: str, files: DriverFiles) -> None:
    root = os.path.join(directory, "driver")
    own = f"usr/lib/{files.triplet}/nvidia"
    _copy_libraries(os.path.join(root, own), files, _TEGRA_LIBRARIES)
    texts = {
        f"{LISTS}/{name}": text.format(triplet=files.triplet) for name, text in _TEGRA_LISTS.items()
    }
    texts["etc/nv_tegra_release"] = "# R36 (release), REVISION: 4.0, GCID: 1, BOARD: generic\n"
    texts["lib/firmware/tegra23x/nvhost_nvdec050.fw"] = "firmware\n"
    texts["usr/local/cuda-12.6/version.json"] = "{}\n"
    write_tree(root, texts)
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
    write_tree(os.path.join(directory, "sys"), {"devices/soc0/family": "Tegra\n"})
    with open(os.path.join(directory, "proc/devices"), encoding="ascii") as file:
        free = free_majors(file.read())
    gpu, ctrl = next(free), next(free)
    video = group_of("video", 44)
    nodes = [
        Node("nvmap", _MISC_MAJOR, _NVMAP_MINOR, 0o660, video),
        Node("nvhost-gpu", gpu, 0, 0o660, video),
        Node("nvhost-ctrl-gpu", gpu, 1, 0o660, video),
        Node("nvgpu/igpu0/ctrl", ctrl, 0, 0o660, video),
        Node("nvgpu/igpu0/as", ctrl, 1, 0o660, video),
        Node("nvhost-vic", gpu, 9, 0o660, video),  # not listed
        Node("dri/renderD128", DRM_MAJOR, 128, 0o660, video),
    ]
    make_nodes(os.path.join(directory, "dev"), nodes)


def _make_wsl(directory: str, files: DriverFiles) -> None:
    root = os.path.join(directory, "driver")
    store = os.path.join(root, STORE)
    _copy_libraries(store, files, _WSL_LIBRARIES)
    for name, soname in _WSL_STAND_INS.items():
        build_stand_in(os.path.join(store, name), soname)
    own = os.path.join(root, "usr/lib/wsl/lib")
    os.makedirs(own)
    build_stand_in(os.path.join(own, "libdxcore.so"), "libdxcore.so")
    shutil.copyfile(os.path.join(store, "libcuda_loader.so"), os.path.join(own, "libcuda.so.1.1"))
    write_tree(root, {f"{STORE}/nvcubins.bin": "cubins\n", f"{STORE}/nv_dispi.inf": "inf\n"})
    smi = os.path.join(store, "nvidia-smi")
    with open(smi, "w", encoding="ascii") as file:
        file.write('#!/bin/sh\necho "nvidia-smi of Windows"\n')
    os.chmod(smi, 0o755)  # noqa: S103 - a program
    make_nodes(os.path.join(directory, "dev"), [Node("dxg", _MISC_MAJOR, _DXG_MINOR)])
    write_tree(
        os.path.join(directory, "sys"), {"class/misc/dxg/dev": f"{_MISC_MAJOR}:{_DXG_MINOR}\n"}
    )


def _copy_libraries(directory: str, files: DriverFiles, names: dict[str, str]) -> None:
    source = os.path.join(files.directory, "usr/lib", files.triplet, "nvidia/current")
    os.makedirs(directory)
    for name, packaged in names.items():
        library = os.path.join(source, packaged.format(v=files.version))
        shutil.copyfile(library, os.path.join(directory, name))
