"""The output of ``nvidia-container-cli info`` and ``list``.

``info`` prints a block of lines for the driver and one for each GPU. ``list`` prints one path per
line, in this order: device nodes, MIG devices, programs, libraries, sockets, firmware. Paths are
relative to the driver root. Files that the original does not know come after those that it knows.

A MIG device has four lines: the capability files of its GPU and compute instance in procfs, and
their device nodes.

Source: libnvidia-container, src/cli/info.c, src/cli/list.c and src/nvc_info.c; output in issues
(NVIDIA/nvidia-docker#1473, apptainer/singularity#6339).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from hooks.edits.grant import decide
from hooks.errors import NvmlFailed
from hooks.node.capabilities import (
    CONTROL,
    MODESET,
    UVM,
    UVM_TOOLS,
    Firmware,
    Library,
    Program,
    Socket,
    every_row,
)
from hooks.node.driver import DriverFile
from hooks.node.gpus import Gpu, MigDevice
from hooks.node.inventory import Inventory
from hooks.requests.naming import parse_names
from hooks.requests.request import Request
from hooks.words import CAPABILITIES, items_of

_PROGRAMS: Final = (
    "nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nv-fabricmanager",
    "nvidia-cuda-mps-control", "nvidia-cuda-mps-server",
)  # fmt: skip
_NOT_LISTED: Final = frozenset({"nvidia-xconfig"})
_LIBRARIES: Final = (
    "libnvidia-ml", "libnvidia-cfg", "libnvidia-nscq", "libcuda", "libcudadebugger",
    "libnvidia-opencl", "libnvidia-gpucomp", "libnvidia-ptxjitcompiler",
    "libnvidia-fatbinaryloader", "libnvidia-allocator", "libnvidia-compiler", "libnvidia-pkcs11",
    "libnvidia-pkcs11-openssl3", "libnvidia-nvvm", "libnvidia-tileiras", "libnvidia-ngx",
    "libvdpau_nvidia", "libnvidia-encode", "libnvidia-opticalflow", "libnvcuvid",
    "libnvidia-eglcore", "libnvidia-glcore", "libnvidia-tls", "libnvidia-glsi", "libnvidia-fbc",
    "libnvidia-ifr", "libnvidia-rtcore", "libnvoptix", "libGLX_nvidia", "libEGL_nvidia",
    "libGLESv2_nvidia", "libGLESv1_CM_nvidia", "libnvidia-glvkspirv", "libnvidia-cbl",
)  # fmt: skip

# From our names of nvmlBrandType_t (hooks.node.nvml) to the original's.
_BRANDS: Final = {
    "quadro": "Quadro", "tesla": "Tesla", "nvs": "NVS", "grid": "GRID", "geforce": "GeForce",
    "titan": "TITAN", "nvidiavapps": "NvidiaVApps", "nvidiavpc": "NvidiaVPC",
    "nvidiavcs": "NvidiaVCS", "nvidiavws": "NvidiaVWS", "nvidiavgaming": "NvidiaVGaming",
    "quadrortx": "QuadroRTX", "nvidiartx": "NvidiaRTX", "nvidia": "Nvidia",
    "geforcertx": "GeForceRTX", "titanrtx": "TitanRTX",
}  # fmt: skip
_UNKNOWN: Final = "Unknown"
_CAPABILITIES: Final = "/proc/driver/nvidia/capabilities"

_DRIVER_TITLES: Final = ("NVRM version", "CUDA version")
_GPU_TITLES: Final = (
    "Device Index", "Device Minor", "Model", "Brand", "GPU UUID", "Bus Location", "Architecture",
)  # fmt: skip


def info_text(inventory: Inventory, *, csv: bool = False) -> str:
    """Return what ``info`` prints, with the final newline.

    Raises:
        NvmlFailed: NVML did not answer. Scripts use the exit status as a check of the driver.
    """
    if inventory.nvml_failure:
        raise NvmlFailed(
            "nvidia-container-cli info",
            found=inventory.nvml_failure,
            do="check that nvidia-smi works on the node",
        )
    driver = (inventory.driver.version, inventory.cuda_version)
    gpus = [_gpu_row(gpu) for gpu in inventory.gpus if not gpu.lost]
    if csv:
        tables = (
            [",".join(row) for row in table]
            for table in ((_DRIVER_TITLES, driver), (_GPU_TITLES, *gpus))
        )
        return "\n\n".join("\n".join(lines) for lines in tables) + "\n"
    blocks = [_block(_DRIVER_TITLES, driver), *(_block(_GPU_TITLES, gpu) for gpu in gpus)]
    return "\n".join(blocks)


def _gpu_row(gpu: Gpu) -> tuple[str, ...]:
    domain, _, rest = gpu.bus_id.partition(":")
    return (
        str(gpu.index),
        str(gpu.minor),
        gpu.model,
        _BRANDS.get(gpu.brand, _UNKNOWN),
        gpu.uuid,
        # NVML's format: a domain of eight digits, upper case.
        f"{domain:0>8}:{rest}".upper(),
        gpu.compute_capability,
    )


def _block(titles: Iterable[str], values: Iterable[str]) -> str:
    return "".join(
        f"{title + ':':<15} {value}\n" for title, value in zip(titles, values, strict=True)
    )


@dataclass(frozen=True, slots=True)
class ListSelection:
    """The kinds of files and devices that ``list`` prints."""

    # comma-separated lists of devices; None for no device nodes at all
    devices: tuple[str, ...] | None = None
    libraries: bool = False  # the driver's libraries
    binaries: bool = False  # the driver's programs
    ipcs: bool = False  # the sockets of the driver's services
    firmwares: bool = False  # GSP firmware
    compat32: bool = False  # 32-bit libraries as well

    @classmethod
    def everything(cls) -> ListSelection:
        """Return the selection of ``list`` without flags."""
        return cls(("all",), libraries=True, binaries=True, ipcs=True, firmwares=True,
                   compat32=True)  # fmt: skip


def list_paths(inventory: Inventory, listed: ListSelection) -> list[str]:
    """Return the paths that ``list`` prints, one per line.

    Raises:
        RequestError: a named device does not exist on the node.
        InventoryError: all devices were requested, and none is usable.
    """
    paths: list[str] = []
    if listed.devices is not None:
        paths += _nodes(inventory, listed.devices)
    root = inventory.driver.root.rstrip("/")
    files = _Files(inventory)
    if listed.binaries:
        paths += files.programs()
    if listed.libraries:
        paths += files.libraries(compat32=False)
        if listed.compat32:
            paths += files.libraries(compat32=True)
    if listed.ipcs:
        paths += inventory.sockets.values()
    if listed.firmwares:
        paths += files.firmwares()
    return [_within(root, path) for path in paths]


def _within(root: str, path: str) -> str:
    return path.removeprefix(root) if root and path.startswith(f"{root}/") else path


def _nodes(inventory: Inventory, devices: Sequence[str]) -> Iterator[str]:
    usable = inventory.nodes.usable
    yield CONTROL.path
    yield from (node.path for node in (UVM, UVM_TOOLS, MODESET) if node.path in usable)
    gpus, mig_devices = _selected(inventory, devices)
    yield from (gpu.path for gpu in gpus)
    for device in mig_devices:
        below = f"{_CAPABILITIES}/gpu{inventory.gpus[device.gpu].minor}/mig"
        yield f"{below}/gi{device.gpu_instance}/access"
        yield f"{below}/gi{device.gpu_instance}/ci{device.compute_instance}/access"
        yield from device.paths


def _selected(
    inventory: Inventory, devices: Sequence[str]
) -> tuple[Sequence[Gpu], Sequence[MigDevice]]:
    """Return the GPUs and MIG devices. A MIG device needs its GPU's node too."""
    items = [item for each in devices for item in items_of(each)]
    if "all" in items and not inventory.gpus:
        return (), ()
    names = parse_names(items, asked=f"--device={','.join(items)}")
    granted = decide(Request(names.devices, CAPABILITIES), inventory)
    wanted = {gpu.index for gpu in granted.gpus} | {each.gpu for each in granted.mig_devices}
    everything = "all" in items
    gpus = [gpu for gpu in inventory.gpus if gpu.index in wanted or (everything and gpu.mig)]
    return gpus, granted.mig_devices


class _Files:
    """The driver's files in the original's order."""

    def __init__(self, inventory: Inventory) -> None:
        self._driver = inventory.driver
        self._rows = {row.name: row for row in every_row() if not isinstance(row, Socket)}

    def programs(self) -> list[str]:
        found = {file.name: file.source for file in self._of(Program)}
        return [found[name] for name in _ordered(found, _PROGRAMS) if name not in _NOT_LISTED]

    def firmwares(self) -> list[str]:
        return sorted(file.source for file in self._of(Firmware))

    def libraries(self, *, compat32: bool) -> list[str]:
        arch = self._driver.arch32 if compat32 else self._driver.arch
        found: dict[str, list[str]] = {}
        for library in self._driver.libraries:
            if library.arch is arch and isinstance(self._rows.get(library.row), Library):
                found.setdefault(library.row.partition(".so")[0], []).append(library.source)
        named = (path for stem in _ordered(found, _LIBRARIES) for path in found[stem])
        return list(dict.fromkeys(named))

    def _of(self, kind: type) -> Iterator[DriverFile]:
        for file in self._driver.files:
            if isinstance(self._rows.get(file.row), kind):
                yield file


def _ordered(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Sort names by ``order``; unknown names come last, in the order they had."""
    places = {name: place for place, name in enumerate(order)}
    return sorted(names, key=lambda name: places.get(name, len(places)))


def log_lines(inventory: Inventory) -> Iterator[str]:
    """Yield the lines of ``--debug``: where each file was found, and what is missing."""
    driver = inventory.driver
    yield f"driver {driver.version} in {driver.root} ({driver.layout}): {driver.why}"
    yield from (f"library directory {directory}" for directory in driver.library_directories)
    yield from (f"selecting {library.source}" for library in driver.libraries)
    yield from (f"selecting {file.source}" for file in driver.files)
    yield from (f"listing ipc path {path}" for path in inventory.sockets.values())
    yield from (f"listing device {path}" for path in inventory.nodes.usable)
    yield from (f"missing device {path}: {why}" for path, why in inventory.nodes.faults.items())
    yield from inventory.notes
