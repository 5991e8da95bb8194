"""NVIDIA's driver in the Windows Subsystem for Linux, version 2.

The driver runs in Windows. Its part for Linux is in a directory of Windows' driver store, mounted
below /usr/lib/wsl/drivers. One device, /dev/dxg, gives access to every GPU.

Rules
- One device stands for all GPUs, as ``all`` or ``0``. CUDA's variables select those that a program
  uses.
- The driver's directory contains libcuda.so.1.1. If Windows has kept several, the right one has a
  libcuda_loader.so that is the same file as libcuda in /usr/lib/wsl/lib; otherwise, the newest is
  used.
- Its files are mounted at their own paths, because libraries find each other through Windows.
  /usr/bin/nvidia-smi is a link to the program there.
- A file in a row of the table comes with the row's capabilities. Other libraries and data
  (``*.bin``, ``*.dll``) always come, because it is unknown what needs them.

Source: NVIDIA Container Toolkit, pkg/nvcdi/driver-wsl.go; NVIDIA's "CUDA on WSL" guide.
"""

from __future__ import annotations

import os
import posixpath
from typing import Final

from hooks.config import Config
from hooks.errors import DriverStoreMissing, PlatformNodeMissing
from hooks.image.layout import Layout
from hooks.node.device_nodes import look_at_node, read_majors
from hooks.node.fingerprint import read_names, read_text
from hooks.plan import Bounds, Contribution, Device, device_of, groups_of
from hooks.platforms.detecting import DXCORE, root_of
from hooks.platforms.files import Files, HostTree, named, unchecked, unknown
from hooks.requests.request import Request
from hooks.words import CAPABILITIES, Capability, GpuIndex, Node, NoDevices, Void

PLATFORM: Final = "NVIDIA WSL2"
DEVICE: Final = "/dev/dxg"

_STORE: Final = "/usr/lib/wsl/drivers"
_OWN: Final = "/usr/lib/wsl/lib"
_CUDA: Final = "libcuda.so.1.1"
_LOADER: Final = "libcuda_loader.so"
_SMI: Final = "nvidia-smi"
_SMI_LINK: Final = "/usr/bin/nvidia-smi"
_MISC: Final = "misc"
_DATA: Final = (".bin", ".dll")

_ANY: Final = CAPABILITIES
_COMPUTE: Final = frozenset({Capability.COMPUTE, Capability.VIDEO})
_UTILITY: Final = frozenset({Capability.UTILITY})
_VIDEO: Final = frozenset({Capability.VIDEO})
_GRAPHICS: Final = frozenset({Capability.GRAPHICS, Capability.DISPLAY})

# Prefixes of file names; any of the capabilities includes a file. The first eight must exist; the
# others differ between drivers.
_REQUIRED: Final = (
    (_CUDA, _COMPUTE),
    (_LOADER, _COMPUTE),
    ("libnvidia-ptxjitcompiler.so.1", _COMPUTE),
    ("libnvidia-ml.so.1", _UTILITY),
    ("libnvidia-ml_loader.so", _UTILITY),
    ("libnvdxgdmal.so.1", _COMPUTE),
    ("nvcubins.bin", _COMPUTE),
    (_SMI, _UTILITY),
)
_KNOWN: Final = (
    *_REQUIRED,
    ("libcudadebugger", _COMPUTE),
    ("libnvidia-nvvm", _COMPUTE),
    ("libnvidia-opencl", _COMPUTE),
    ("libnvcuvid", _VIDEO),
    ("libnvidia-encode", _VIDEO),
    ("libnvidia-opticalflow", _VIDEO),
    ("libnvoptix", _GRAPHICS),
    ("libnvwgf2um", _GRAPHICS),
    ("libnvidia-ngx", frozenset({Capability.NGX})),
    ("nvngx", frozenset({Capability.NGX})),
)


def contribute(request: Request, config: Config, layout: Layout) -> Contribution:
    """Return the edits for the Windows driver.

    Raises:
        UnknownDevice: a GPU other than 0 is named.
        MigUnsupported: a MIG device is named.
        DriverStoreMissing: Windows has no NVIDIA driver for WSL.
        PlatformNodeMissing: there is no usable /dev/dxg.
    """
    for device in named(request.devices, PLATFORM):
        if device != GpuIndex(0):
            raise unknown(device, "one device, 0, stands for every GPU of Windows")
    with_device = not isinstance(request.devices, NoDevices | Void)
    devices = [_device(config, request.source)] if with_device else []
    tree = HostTree(root_of(config), config.dev)
    store, note = _find_store(tree, request.source)
    files = Files(layout)
    dxcore = tree.really(DXCORE)
    if dxcore is None:
        files.miss(DXCORE, DXCORE)
    else:
        files.add(dxcore, "what leads to the driver of Windows")
    present = _names(tree, store)
    for name in (name for name, _ in _REQUIRED if name not in present):
        files.miss(name, store)
    for name in present:
        if request.capabilities.isdisjoint(_capabilities_of(name)):
            continue
        found = tree.really(f"{store}/{name}")
        if found is not None and os.path.isfile(found[0]):
            found = (found[0], f"{store}/{name}")
            there = files.add(found, "file of the driver of Windows", beside_libraries=True)
            if name == _SMI:
                files.link(_SMI_LINK, there, "program")
    return Contribution(
        files.plan(devices, groups_of(devices)),
        Bounds(frozenset(device.major for device in devices), (root_of(config),)),
        vendor=PLATFORM,
        granted=("every GPU of Windows",) if with_device else (),
        notes=(*((note,) if note else ()), *unchecked(request)),
    )


def _device(config: Config, source: str) -> Device:
    majors = read_majors(config)
    told = (read_text(f"{config.sys}/class/misc/dxg/dev") or "").strip().partition(":")[2]
    seen = look_at_node(
        config,
        DEVICE,
        [majors[_MISC]] if _MISC in majors else [],
        int(told) if told.isdecimal() else None,
        _MISC,
    )
    if not isinstance(seen, Node):
        raise PlatformNodeMissing(
            f"GPUs of Windows ({source})",
            found=seen,
            do="update WSL (wsl --update) and the driver of Windows",
        )
    return device_of(seen, "every GPU of Windows")


def _find_store(tree: HostTree, source: str) -> tuple[str, str]:
    """Return the driver's directory, and a note if the choice is uncertain."""
    stores: dict[str, float] = {}
    for path in tree.matches(f"{_STORE}/*"):
        cuda = tree.really(f"{path}/{_CUDA}")
        if cuda is not None and os.path.isfile(cuda[0]):
            stores[path] = os.stat(cuda[0]).st_mtime
    if not stores:
        raise DriverStoreMissing(
            f"GPUs of Windows ({source})",
            found=f"no directory below {_STORE} has {_CUDA}",
            do="install NVIDIA's driver in Windows, and restart WSL (wsl --shutdown)",
        )
    if len(stores) == 1:
        return next(iter(stores)), ""
    own = next(filter(None, map(tree.really, (f"{_OWN}/{_CUDA}", f"{_OWN}/libcuda.so.1"))), None)
    for path in stores:
        loader = tree.really(f"{path}/{_LOADER}")
        if own is not None and loader is not None and _is_same(own[0], loader[0]):
            return path, ""
    newest = max(stores, key=lambda path: stores[path])
    return newest, f"Windows has {len(stores)} drivers; which is in use is not told, newest taken"


_MOST_COMPARED: Final = 16 << 20


def _is_same(one: str, other: str) -> bool:
    """Whether two small files have the same content."""
    try:
        if os.stat(one).st_size != os.stat(other).st_size:
            return False
        with open(one, "rb") as ours, open(other, "rb") as theirs:
            return ours.read(_MOST_COMPARED) == theirs.read(_MOST_COMPARED)
    except OSError:
        return False


def _names(tree: HostTree, store: str) -> list[str]:
    """Return the names of the driver's files that containers may get."""
    where = tree.really(store)
    every = (read_names(where[0]) or ()) if where is not None else ()
    return [name for name in every if ".so" in name or name.endswith(_DATA) or name == _SMI]


def _capabilities_of(name: str) -> frozenset[str]:
    """Return the capabilities that include a driver file; any of them suffices."""
    known = (brings for start, brings in _KNOWN if posixpath.basename(name).startswith(start))
    return next(known, _ANY)
