"""Find the node's GPUs, MIG devices and device nodes, from procfs, sysfs and /dev.

Rules
- procfs decides, because it works without NVML, which may hang. Only NVML knows memory, MIG mode
  without instances, and the UUIDs and profiles of MIG devices.
- A GPU's index is NVML's, as in nvidia-smi: its position in PCI bus order, also used without NVML's
  report. A GPU that the driver's settings exclude has no index.
- A GPU is in MIG mode if NVML says so or if procfs shows that it has GPU instances.
- A GPU that fell off the bus (NVML cannot open it, or sysfs no longer lists it) keeps its index as
  long as procfs lists it, because NVML's indices do not change either. Its node has a fault.
- NVML alone reports MIG mode without instances, and a GPU that cannot be opened, so these are
  checked again after a while (:func:`find_unsettled`). So are instances if procfs shows others than
  NVML, because they have changed between the two reads.
- A GPU that the configuration excludes by UUID or PCI address stays in the inventory with its
  index, so that the others keep nvidia-smi's indices. ``all`` leaves it out; naming it is an error.
- None of its nodes is usable: its own, those of its MIG devices, and those below /dev/dri. So no
  plan from the inventory can contain them.
- If the configuration excludes a UUID that matches no GPU, GPUs with unknown UUIDs are excluded,
  too, because one of them may have it.
- Device nodes are read each time and not cached, because they appear when a module is first loaded.
  A node counts if it is a character device with the major number that /proc/devices gives to its
  driver; otherwise the reason is kept for the message.

Source: kernel-open/nvidia/nv-procfs.c and nv-caps.c of NVIDIA's open kernel modules; the MIG
user guide, "Device Nodes and Capabilities".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final

from api.values import dataclass, replace
from hooks.config import Config
from hooks.node.capabilities import CONTROL, FRONTEND, MODESET, UVM, UVM_TOOLS
from hooks.node.device_nodes import (
    CAPS,
    DRM,
    cap_minors,
    cap_path,
    host_path,
    look_at_node,
    read_majors,
)
from hooks.node.fingerprint import Fingerprint
from hooks.node.nvml import NvmlGpu, NvmlReport
from hooks.words import Node


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU."""

    index: int  # its place in PCI bus order, from 0
    minor: int  # the number in its node's name, and its minor device number
    uuid: str  # "GPU-…" in lower case; "" if neither procfs nor NVML reports it
    bus_id: str  # its PCI address ("0000:07:00.0")
    model: str
    mig: bool = False
    memory: int | None = None  # total memory in bytes; None if NVML did not report it
    drm: tuple[str, ...] = ()  # the names of its nodes below /dev/dri
    lost: str = ""  # why it is lost (hooks.node.nvml_probe); "" if it is not, or if unknown
    compute_capability: str = ""  # CUDA's ("9.0"); "" if NVML did not report it
    brand: str = ""  # its product line ("tesla"); "" if NVML did not report it
    architecture: str = ""  # ("Hopper"); "" if NVML did not report it
    excluded: bool = False  # whether the configuration excludes it (hooks.edits.exclusions)
    # since when and why it is out of service (hooks.node.drained); "" if it is in service
    drained: str = ""

    @property
    def path(self) -> str:
        """The path of its device node in the container."""
        return f"/dev/nvidia{self.minor}"

    @property
    def drm_paths(self) -> tuple[str, ...]:
        """The paths of its DRM nodes in the container."""
        return tuple(f"/dev/dri/{name}" for name in self.drm)

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.uuid or self.bus_id})"


@dataclass(frozen=True, slots=True)
class MigDevice:
    """A MIG device: a compute instance of a GPU instance."""

    gpu: int
    index: int
    uuid: str  # "MIG-…" in lower case
    gpu_instance: int
    compute_instance: int  # the id of the compute instance within the GPU instance
    profile: str = ""  # its shape ("1g.10gb"); "" if NVML did not report it
    # the minor numbers of its two capability nodes; empty if the kernel lists none
    caps: tuple[int, ...] = ()
    # since when and why it, or its GPU, is out of service; "" if it is in service
    drained: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of its capability nodes in the container."""
        return tuple(cap_path(minor) for minor in self.caps)

    @property
    def has_graphics(self) -> bool:
        """Whether its profile has a graphics engine ("1g.10gb+gfx")."""
        return "gfx" in self.profile

    def __str__(self) -> str:
        return f"MIG device {self.gpu}:{self.index} ({self.uuid})"


@dataclass(frozen=True, slots=True)
class Nodes:
    """The present state of the device nodes."""

    usable: dict[str, Node]  # the correct nodes, by path in the container
    faults: dict[str, str]  # the fault of each other node, by path in the container
    majors: frozenset[int]  # the drivers' major numbers
    lost: frozenset[str] = frozenset()  # the nodes of lost GPUs, by path in the container
    # what is in a node's place instead: another file, or a device with other numbers
    wrong: frozenset[str] = frozenset()


_LINES: Final = ("Model", "GPU UUID", "Device Minor", "Bus Location", "GPU Excluded")


@dataclass(frozen=True, slots=True)
class FoundGpus:
    """The GPUs of a node, from procfs and NVML."""

    gpus: tuple[Gpu, ...]
    reported: dict[str, NvmlGpu]  # NVML's reports, by the PCI address in procfs
    notes: tuple[str, ...] = ()  # GPUs of procfs that were left out, for display
    conflicts: tuple[str, ...] = ()  # differences between NVML and procfs, for display


_NOT_REPORTED: Final = NvmlGpu(index=-1)


def find_gpus(fingerprint: Fingerprint, config: Config, report: NvmlReport | None) -> FoundGpus:
    """Return the node's GPUs.

    Args:
        report: NVML's report; None if there is none.
    """
    listed, notes = _listed(fingerprint, config)
    reported, others = _match(config, listed, report)
    conflicts: list[str] = []
    found = []
    for gpu in listed:
        nvml = reported.get(gpu.bus_id, _NOT_REPORTED)
        conflicts += _conflicts(gpu, nvml)
        if gpu.uuid and nvml.uuid not in {"", gpu.uuid}:  # NVML's report is about another GPU
            nvml = reported[gpu.bus_id] = NvmlGpu(nvml.index)
        lost = nvml.lost
        if report is not None and gpu.bus_id not in reported and _has_node(config, gpu):
            lost = "NVML does not count it"
            conflicts.append(f"procfs has a GPU at {gpu.bus_id}, and NVML does not count it")
        found.append(
            replace(
                gpu,
                uuid=gpu.uuid or nvml.uuid,
                model=gpu.model or nvml.name,
                mig=bool(_instances(fingerprint, config, gpu.minor)) or nvml.mig,
                memory=nvml.memory,
                drm=_drm_names(fingerprint, config, gpu.bus_id),
                lost=lost,
                compute_capability=nvml.compute_capability,
                brand=nvml.brand,
                architecture=nvml.architecture,
            )
        )
    conflicts += [f"NVML has {_named(nvml)}, and procfs does not" for nvml in others]
    return FoundGpus(_numbered(found, reported), reported, tuple(notes), tuple(conflicts))


def _listed(fingerprint: Fingerprint, config: Config) -> tuple[list[Gpu], list[str]]:
    """Return the GPUs in procfs, in bus order, and why others were left out."""
    notes: list[str] = []
    found: list[Gpu] = []
    directory = f"{config.proc}/driver/nvidia/gpus"
    for name in sorted(fingerprint.names(directory), key=bus_order):
        lines = fingerprint.fields(f"{directory}/{name}/information", _LINES)
        bus_id = (lines["Bus Location"] or name).lower()
        if lines["GPU Excluded"] == "Yes":
            notes.append(f"the GPU at {bus_id} is excluded by the driver's settings")
        elif not lines["Device Minor"].isdecimal():
            notes.append(f"the GPU at {bus_id} has no device minor in procfs; it is left out")
        else:
            minor, uuid = int(lines["Device Minor"]), _uuid(lines["GPU UUID"])
            found.append(Gpu(len(found), minor, uuid, bus_id, lines["Model"]))
    return found, notes


def _match(
    config: Config, listed: list[Gpu], report: NvmlReport | None
) -> tuple[dict[str, NvmlGpu], list[NvmlGpu]]:
    """Match NVML's GPUs to procfs' by PCI address; also return those without a match.

    The PCI address decides, then the UUID, then the minor number. Lost GPUs often have none of
    these: they are matched to the remaining ones, in bus order, which is also NVML's.
    """
    left, reported = list(listed), {}
    others = list(report.gpus) if report is not None else []

    def take(is_same: Callable[[Gpu, NvmlGpu], bool]) -> None:
        for gpu in tuple(left):
            nvml = next((each for each in others if is_same(gpu, each)), None)
            if nvml is not None:
                reported[gpu.bus_id] = nvml
                left.remove(gpu)
                others.remove(nvml)

    take(lambda gpu, nvml: gpu.bus_id == nvml.bus_id)
    take(lambda gpu, nvml: bool(gpu.uuid) and gpu.uuid == nvml.uuid)
    take(lambda gpu, nvml: not nvml.bus_id and not nvml.uuid and gpu.minor == nvml.minor)
    # NVML does not count GPUs without a node here.
    left = [gpu for gpu in left if _has_node(config, gpu)] or left
    take(lambda _, nvml: not nvml.bus_id and not nvml.uuid and nvml.minor is None)
    return reported, others


def _has_node(config: Config, gpu: Gpu) -> bool:
    """Whether NVML can open a GPU's node; if not, it does not count the GPU."""
    majors = read_majors(config)
    its = {majors[driver] for driver in FRONTEND if driver in majors}
    if not its:
        return os.path.lexists(host_path(config, gpu.path))
    return isinstance(look_at_node(config, gpu.path, its, gpu.minor, FRONTEND[0]), Node)


def _conflicts(gpu: Gpu, nvml: NvmlGpu) -> Iterator[str]:
    """Yield the differences of NVML from procfs, which decides."""
    at = gpu.bus_id
    if gpu.uuid and nvml.uuid not in {"", gpu.uuid}:
        yield f"NVML calls the GPU at {at} {nvml.uuid}, procfs {gpu.uuid}"
    elif nvml.bus_id not in {"", at}:
        yield f"NVML has {gpu.uuid or gpu.path} at {nvml.bus_id}, procfs at {at}"
    if nvml.minor not in {None, gpu.minor}:
        yield f"NVML has the GPU at {at} as /dev/nvidia{nvml.minor}, procfs as {gpu.path}"


def _named(nvml: NvmlGpu) -> str:
    what = f"GPU {nvml.index}"
    if nvml.bus_id:
        what += f" at {nvml.bus_id}"
    return f"{what} ({nvml.lost})" if nvml.lost else what


def _numbered(found: list[Gpu], reported: Mapping[str, NvmlGpu]) -> tuple[Gpu, ...]:
    """Return the GPUs by index: NVML's if it has reported one, because users see that one.

    NVML does not count a GPU without a node here, for example if the node is itself a container
    with some of a machine's GPUs. Such GPUs get the remaining numbers, in bus order.
    """
    numbers = {nvml.index for nvml in reported.values()}
    if len(numbers) < len(reported) or max(numbers, default=0) >= len(found):
        return tuple(found)  # the reported indices conflict
    free = iter(sorted(set(range(len(found))) - numbers))
    numbered = [
        replace(gpu, index=reported[gpu.bus_id].index if gpu.bus_id in reported else next(free))
        for gpu in found
    ]
    return tuple(sorted(numbered, key=lambda gpu: gpu.index))


def find_unsettled(fingerprint: Fingerprint, config: Config, found: FoundGpus) -> tuple[str, ...]:
    """Return, for display, NVML's reports about GPUs that procfs does not confirm."""
    return tuple(filter(None, (_unsettled(fingerprint, config, gpu, found) for gpu in found.gpus)))


def _unsettled(fingerprint: Fingerprint, config: Config, gpu: Gpu, found: FoundGpus) -> str:
    if gpu.lost:
        return f"{gpu} is lost: {gpu.lost}"
    nvml = found.reported.get(gpu.bus_id)
    if nvml is None:
        return ""
    shown = _instances(fingerprint, config, gpu.minor)
    known = {(device.gpu_instance, device.compute_instance) for device in nvml.mig_devices}
    if {pair for pair in shown if pair[1] is not None} != known:
        return f"{gpu} has other MIG devices in procfs than NVML reports"
    return f"{gpu} is in MIG mode, and has no instances" if nvml.mig and not shown else ""


def _instances(fingerprint: Fingerprint, config: Config, minor: int) -> set[tuple[int, int | None]]:
    """Return a GPU's GPU instances, each with its compute instances and None for itself."""
    directory = f"{config.proc}/driver/nvidia/capabilities/gpu{minor}/mig"
    found: set[tuple[int, int | None]] = set()
    for name in fingerprint.names(directory):
        if not (name.startswith("gi") and name[2:].isdecimal()):
            continue
        instance = int(name[2:])
        found.add((instance, None))
        for below in fingerprint.names(f"{directory}/{name}"):
            if below.startswith("ci") and below[2:].isdecimal():
                found.add((instance, int(below[2:])))
    return found


def find_mig_devices(config: Config, found: FoundGpus) -> tuple[MigDevice, ...]:
    """Return NVML's MIG devices by GPU and index, with the kernel's capability nodes.

    Args:
        found: the result of :func:`find_gpus`; it knows MIG devices only from NVML.
    """
    reported = [
        (gpu, found.reported[gpu.bus_id].mig_devices)
        for gpu in found.gpus
        if gpu.mig and gpu.bus_id in found.reported
    ]
    if not any(devices for _, devices in reported):
        return ()
    minors = cap_minors(config)
    return tuple(
        MigDevice(
            gpu=gpu.index,
            index=device.index,
            uuid=device.uuid,
            gpu_instance=device.gpu_instance,
            compute_instance=device.compute_instance,
            profile=device.profile,
            caps=_caps(minors, gpu.minor, device.gpu_instance, device.compute_instance),
        )
        for gpu, devices in reported
        for device in devices
    )


def look_at_nodes(
    config: Config, gpus: Collection[Gpu], mig: Collection[MigDevice], other_dev: str | None = None
) -> Nodes:
    """Return the current state of every device node that a container may get.

    Nodes of excluded GPUs are unusable, whatever their state.

    Args:
        other_dev: a directory for nodes missing in the host's ``dev``: a driver container creates
            them in its own /dev, unless it mounts the host's.
    """
    majors = read_majors(config)
    usable: dict[str, Node] = {}
    faults, withheld = _lost(config, gpus), _withheld(gpus, mig)
    lost = set(faults)
    wrong: set[str] = set()
    elsewhere = replace(config, dev=other_dev) if other_dev is not None else None
    for path, drivers, minor in _expected(gpus, mig):
        if path in withheld:
            continue
        its = {majors[driver] for driver in drivers if driver in majors}
        seen = look_at_node(config, path, its, minor, drivers[0])
        if elsewhere is not None and not isinstance(seen, Node):
            other = look_at_node(elsewhere, path, its, minor, drivers[0])
            seen = other if isinstance(other, Node) else seen
        if isinstance(seen, Node):
            if path not in lost:
                usable[path] = seen
        elif its and os.path.lexists(host_path(config, path)):
            # NVML opens a GPU by its node, and calls it lost if that fails.
            faults[path] = seen
            wrong.add(path)
        else:
            faults.setdefault(path, seen)
    of_interest = {*FRONTEND, *UVM.drivers, *CAPS, *DRM}
    known = frozenset(majors[d] for d in of_interest if d in majors)
    return Nodes(usable, faults | withheld, known, frozenset(lost - wrong), frozenset(wrong))


def _lost(config: Config, gpus: Iterable[Gpu]) -> dict[str, str]:
    """Return the faults of lost GPUs' nodes."""
    devices = f"{config.sys}/bus/pci/devices"
    has_list = os.path.isdir(devices)
    faults = {}
    for gpu in gpus:
        if gpu.lost:
            faults[gpu.path] = f"it is lost: {gpu.lost}"
        elif has_list and not os.path.lexists(f"{devices}/{gpu.bus_id}"):
            faults[gpu.path] = f"it fell off the bus: {devices} has no {gpu.bus_id}"
    return faults


def _withheld(gpus: Iterable[Gpu], mig: Collection[MigDevice]) -> dict[str, str]:
    """Return the nodes of excluded GPUs, by path in the container, each with the reason."""
    found: dict[str, str] = {}
    for gpu in gpus:
        if gpu.excluded:
            paths = [gpu.path, *gpu.drm_paths]
            paths += [path for device in mig if device.gpu == gpu.index for path in device.paths]
            found |= dict.fromkeys(paths, f"{gpu} is excluded by the configuration")
    return found


def _expected(
    gpus: Iterable[Gpu], mig: Iterable[MigDevice]
) -> Iterator[tuple[str, tuple[str, ...], int | None]]:
    for control in (CONTROL, MODESET, UVM, UVM_TOOLS):
        yield control.path, control.drivers, control.minor
    for gpu in gpus:
        yield gpu.path, FRONTEND, gpu.minor
        for path in gpu.drm_paths:
            yield path, DRM, None
    # MIG devices of one GPU instance share its node.
    for minor in dict.fromkeys(minor for device in mig for minor in device.caps):
        yield cap_path(minor), CAPS, minor


def _caps(minors: dict[str, int], gpu: int, instance: int, compute: int) -> tuple[int, ...]:
    wanted = (f"gpu{gpu}/gi{instance}/access", f"gpu{gpu}/gi{instance}/ci{compute}/access")
    found = tuple(minors[name] for name in wanted if name in minors)
    return found if len(found) == len(wanted) else ()


def _drm_names(fingerprint: Fingerprint, config: Config, bus_id: str) -> tuple[str, ...]:
    names = fingerprint.names(f"{config.sys}/bus/pci/devices/{bus_id}/drm")
    return tuple(name for name in names if name.startswith(("card", "renderD")))


def bus_order(bus_id: str) -> tuple[int, ...]:
    """Return a PCI address as numbers, since as text, domain 10000 would sort before 2."""
    try:
        return tuple(int(part, 16) for part in bus_id.replace(".", ":").split(":"))
    except ValueError:
        return ()


def _uuid(text: str) -> str:
    """Return a UUID from procfs; "" for the question marks before a GPU's first use."""
    prefix, _, digits = text.partition("-")
    return f"GPU-{digits.lower()}" if prefix == "GPU" and "?" not in digits else ""


def mark_excluded(
    gpus: tuple[Gpu, ...], names: tuple[str, ...]
) -> tuple[tuple[Gpu, ...], list[str]]:
    """Return the GPUs, with the excluded ones marked, and notes for display.

    Args:
        names: UUIDs and PCI addresses, in the notation of :mod:`hooks.node.gpus`.
    """
    if not names:
        return gpus, []
    known = {name for gpu in gpus for name in (gpu.uuid, gpu.bus_id)}
    unmatched = [name for name in names if name not in known]
    notes = [f"{name} is excluded, and no GPU of this node matches" for name in unmatched]
    doubtful = any(name.startswith("GPU-") for name in unmatched)
    marked = []
    for gpu in gpus:
        named = gpu.uuid in names or gpu.bus_id in names
        if not named and doubtful and not gpu.uuid:
            notes.append(f"{gpu} is excluded: its UUID is not known, and may be one to exclude")
            named = True
        marked.append(replace(gpu, excluded=named))
    return tuple(marked), notes
