"""Gather the facts about NVIDIA's driver: modules, files, GPUs, device nodes.

Source: hooks.node, the code that the shim itself uses; Documentation/ABI/testing/sysfs-bus-pci of
the kernel.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from hooks.config import Config, Platform
from hooks.errors import DriverMismatch, InventoryError
from hooks.node.capabilities import CONTROL, MODESET, UVM, UVM_TOOLS
from hooks.node.device_nodes import read_majors
from hooks.node.drained import read_drains
from hooks.node.driver import Driver as FoundDriver
from hooks.node.driver import find_driver
from hooks.node.fingerprint import Fingerprint, read_names, read_text
from hooks.node.gpus import Gpu as FoundGpu
from hooks.node.gpus import Nodes, find_gpus, look_at_nodes, mark_excluded
from hooks.node.host_setup import is_loaded, may_make_nodes, parse_parameters
from hooks.node.manifests import is_manifest, library_paths, read_manifest
from hooks.node.roots import DRIVER_CONTAINER, choose, is_version, module_version
from hooks.platforms import platform_of
from integration.containers.node_processes import node_processes
from integration.doctor.facts import Driver, Gpu, Installed, PciGpu
from integration.doctor.places import Places

_VENDOR: Final = "0x10de"
_DISPLAY: Final = "0x03"
_MODULES: Final = (
    "nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm", "nouveau", "nova_core", "vfio_pci",
)  # fmt: skip
_MPS_ROOT: Final = "/run/nvidia/mps"
_MPS: Final = ("/tmp/nvidia-mps", _MPS_ROOT)  # noqa: S108 - where NVIDIA's daemon has it
_IMEX: Final = "nvidia-caps-imex-channels"
_ANCHOR: Final = "libcuda.so."


def look_at_driver(places: Places) -> Driver:
    """Return the driver and its devices."""
    config = places.config()
    fingerprint = Fingerprint(config.host_root)
    platform = platform_of(config)
    version = root = fault = ""
    mismatch = False
    found: FoundDriver | None = None
    try:
        found = find_driver(fingerprint, config)
        version, root = found.version, places.within(found.root)
    except InventoryError as error:
        fault, mismatch = error.found, isinstance(error, DriverMismatch)
    gpus = find_gpus(fingerprint, config, None).gpus
    gpus, _ = mark_excluded(gpus, config.excluded_gpus)
    other_dev = f"{found.root}/dev" if found is not None and root != "/" else None
    nodes = look_at_nodes(config, gpus, (), other_dev)
    pci = tuple(_pci(config))
    lost = [gpu for gpu in gpus if not gpu.excluded and _is_lost(gpu, pci)]
    # The nodes of excluded and lost GPUs are not reported.
    silent = [path for g in gpus if g.excluded or g in lost for path in (g.path, *g.drm_paths)]
    silent += _unloaded(config)
    faults = {path: why for path, why in sorted(nodes.faults.items()) if path not in silent}
    parameters = parse_parameters(read_text(f"{config.proc}/driver/nvidia/params") or "")
    channels = read_names(f"{config.dev}/{_IMEX}") or ()
    return Driver(
        module=module_version(fingerprint, config),
        modules=tuple(m for m in _MODULES if os.path.isdir(f"{config.sys}/module/{m}")),
        version=version,
        root=root,
        fault=fault if platform == Platform.NVML else "",
        mismatch=mismatch,
        installed=tuple(dict.fromkeys(_installed(places, config))),
        pci=pci,
        gpus=tuple(
            Gpu(g.index, g.uuid, g.bus_id, g.minor, g.model) for g in gpus if not g.excluded
        ),
        lost=tuple((gpu.path, nodes.faults[gpu.path]) for gpu in lost),
        wrong_nodes=tuple((p, why) for p, why in faults.items() if _is_there(config, p)),
        missing_nodes=tuple(path for path in faults if not _is_there(config, path)),
        may_make_nodes=may_make_nodes(parameters),
        char_links=tuple(_unlinked(config, nodes)),
        mps_pipe=next((p for p in _pipes(places) if _has_pipe(places.at(p))), ""),
        mps_runs=any(
            p.name.startswith("nvidia-cuda-mps") for p in node_processes(places.at("/proc"))
        ),
        imex=_IMEX in read_majors(config),
        imex_channels=sum(name.startswith("channel") for name in channels),
        platform_faults=tuple(_platform_faults(config, platform)),
        drained=tuple((each.device, each.why, each.reset) for each in read_drains(config)),
        manifests=tuple(_manifests(places, found)) if found is not None else (),
        others=found.others if found is not None else (),
    )


def _manifests(places: Places, driver: FoundDriver) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield each manifest's path, the paths in it, and why containers cannot use it, or ""."""
    names = {library.soname for library in driver.libraries}
    for file in driver.files:
        if not is_manifest(file.name):
            continue
        paths: tuple[str, ...] = ()
        why = ""
        try:
            paths = library_paths(file.name, read_manifest(file.source))
        except (OSError, ValueError) as error:
            why = str(error)
        unknown = [path for path in paths if os.path.basename(path) not in names]
        if unknown:
            why = f"it names {', '.join(unknown)}, which this driver does not have"
        if paths or why:
            yield places.within(file.source), paths, why


def _pipes(places: Places) -> Iterator[str]:
    """Yield the possible directories of MPS pipes; a device plugin has one per resource."""
    yield from _MPS
    root = places.at(_MPS_ROOT)
    for pipe in sorted(glob.glob("*/pipe", root_dir=root) + glob.glob("*/*/pipe", root_dir=root)):
        yield f"{_MPS_ROOT}/{pipe}"


def _has_pipe(directory: str) -> bool:
    return os.path.exists(f"{directory}/control")


def _installed(places: Places, config: Config) -> Iterator[Installed]:
    roots = [config.driver_root] if config.driver_root else []
    roots += [config.host_root, config.host_root.rstrip("/") + DRIVER_CONTAINER]
    for root in dict.fromkeys(roots):
        apart = replace(config, driver_root=root)
        try:
            found = choose(Fingerprint(config.host_root), apart, None)
        except InventoryError:
            continue
        names = {name for _, names in found.directories for name in names}
        versions = {n.removeprefix(_ANCHOR) for n in names if n.startswith(_ANCHOR)}
        for version in sorted(filter(is_version, versions)):
            yield Installed(places.within(root), found.layout.name, version)


def _pci(config: Config) -> Iterator[PciGpu]:
    bus = f"{config.sys}/bus/pci/devices"
    for name in read_names(bus) or ():
        if (read_text(f"{bus}/{name}/vendor") or "").strip() == _VENDOR and (
            read_text(f"{bus}/{name}/class") or ""
        ).startswith(_DISPLAY):
            try:
                driver = os.path.basename(os.readlink(f"{bus}/{name}/driver"))
            except OSError:
                driver = ""
            yield PciGpu(name, driver)


def _is_lost(gpu: FoundGpu, pci: tuple[PciGpu, ...]) -> bool:
    return bool(gpu.lost) or all(gpu.bus_id != each.bus_id for each in pci)


def _unloaded(config: Config) -> Iterator[str]:
    """Yield the nodes of modules that are not loaded; their state is irrelevant."""
    majors = read_majors(config)
    for control in (CONTROL, MODESET, UVM, UVM_TOOLS):
        of_module = control is not MODESET or is_loaded(config, "nvidia-modeset")
        if majors.keys().isdisjoint(control.drivers) or not of_module:
            yield control.path


def _is_there(config: Config, path: str) -> bool:
    return os.path.lexists(config.dev + path.removeprefix("/dev"))


def _unlinked(config: Config, nodes: Nodes) -> Iterator[str]:
    for node in nodes.usable.values():
        number = os.makedev(node.major, node.minor)
        name = f"{node.major}:{node.minor}"
        try:
            right = os.stat(f"{config.dev}/char/{name}").st_rdev == number
        except OSError:
            right = False
        if not right:
            yield name


def _platform_faults(config: Config, platform: str) -> Iterator[str]:
    root = (config.driver_root or config.host_root).rstrip("/")
    if platform == Platform.TEGRA:
        names = read_names(f"{root}{config.csv_directory}") or ()
        if not any(name.endswith(".csv") for name in names):
            yield f"{config.csv_directory} has no *.csv file"
    elif platform == Platform.WSL:
        if not os.path.exists(f"{config.dev}/dxg"):
            yield "/dev/dxg does not exist"
        if not os.path.exists(f"{root}/usr/lib/wsl/lib/libdxcore.so"):
            yield "/usr/lib/wsl/lib/libdxcore.so does not exist"
    elif os.path.exists(f"{root}/etc/nv_tegra_release") and not read_names(
        f"{config.proc}/driver/nvidia/gpus"
    ):
        yield f"this is a Tegra machine, but {config.csv_directory} has no *.csv file"
