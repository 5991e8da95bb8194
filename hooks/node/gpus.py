"""The node's GPUs, MIG devices and device nodes, from procfs, sysfs and /dev.

Rules
- procfs is believed: it is there without NVML, which may hang. NVML adds what only it knows:
  memory, MIG mode without instances, and the UUIDs and profiles of MIG devices.
- A GPU's index is NVML's, as nvidia-smi shows it: the place in PCI bus order, which it is too
  where NVML has not said any. A GPU that the driver was told to exclude has none.
- A GPU is in MIG mode if NVML says so or if procfs shows GPU instances of it.
- A GPU that fell off the bus keeps its index as long as procfs lists it, for NVML's indices stay
  as well; its node has a fault. It is one that NVML cannot open, or that sysfs lists no more.
- Of two things nothing but NVML tells, so its word is doubted after a while
  (:func:`find_unsettled`): MIG mode without instances, and a GPU that cannot be opened. So is
  its word on instances if procfs shows others: they were changed between the two looks.
- Device nodes are looked at each time and not kept: they appear when a module is first
  loaded. One counts if it is a character device with the major number that /proc/devices
  gives to its driver; otherwise what is wrong with it is kept for the message.

Source: kernel-open/nvidia/nv-procfs.c and nv-caps.c of NVIDIA's open kernel modules; the MIG
user guide, "Device Nodes and Capabilities".
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final

from api.values import changed, value
from hooks.edits.capabilities import CONTROL, FRONTEND, MODESET, UVM, UVM_TOOLS
from hooks.node.witness import read_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from hooks.config import Config
    from hooks.node.nvml import NvmlReport
    from hooks.node.witness import Witness

__all__ = [
    "CAPS",
    "Gpu",
    "MigDevice",
    "Node",
    "Nodes",
    "bus_order",
    "cap_minors",
    "cap_path",
    "find_gpus",
    "find_mig_devices",
    "look_at_node",
    "look_at_nodes",
    "read_majors",
]

CAPS: Final = ("nvidia-caps",)
DRM: Final = ("drm",)


@value
class Gpu:
    """A GPU.

    Attributes:
        index: its place in PCI bus order, from 0.
        minor: the number in its node's name, and its minor device number.
        uuid: "GPU-…" in lower case; "" if neither procfs nor NVML knows it.
        bus_id: its PCI address ("0000:07:00.0").
        model: its name for people.
        mig: whether it is in MIG mode.
        memory: bytes of memory in all; None if NVML did not say.
        drm: the names of its nodes below /dev/dri.
        lost: why NVML cannot open it; "" if it can, or was not asked.
        compute_capability: of CUDA ("9.0"); "" if NVML did not say.
        brand: what it is sold as ("tesla"); "" if NVML did not say.
        excluded: whether the configuration gives it to nobody (:mod:`hooks.requests.exclusions`).
    """

    index: int
    minor: int
    uuid: str
    bus_id: str
    model: str
    mig: bool = False
    memory: int | None = None
    drm: tuple[str, ...] = ()
    lost: str = ""
    compute_capability: str = ""
    brand: str = ""
    excluded: bool = False

    @property
    def path(self) -> str:
        """Its device node, in the container."""
        return f"/dev/nvidia{self.minor}"

    @property
    def drm_paths(self) -> tuple[str, ...]:
        """Its nodes of the direct rendering manager, in the container."""
        return tuple(f"/dev/dri/{name}" for name in self.drm)

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.uuid or self.bus_id})"


@value
class MigDevice:
    """A MIG device: a compute instance of a GPU instance.

    Attributes:
        gpu: the index of its GPU.
        index: its index within its GPU.
        uuid: "MIG-…" in lower case.
        gpu_instance: the id of the GPU instance.
        compute_instance: the id of the compute instance within it.
        profile: its shape ("1g.10gb"); "" if NVML did not say.
        caps: the minor numbers of its two capability nodes; empty if the kernel lists none.
    """

    gpu: int
    index: int
    uuid: str
    gpu_instance: int
    compute_instance: int
    profile: str = ""
    caps: tuple[int, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """Its capability nodes, in the container."""
        return tuple(cap_path(minor) for minor in self.caps)

    @property
    def has_graphics(self) -> bool:
        """Whether its profile has a graphics engine ("1g.10gb+gfx")."""
        return "gfx" in self.profile

    def __str__(self) -> str:
        return f"MIG device {self.gpu}:{self.index} ({self.uuid})"


def cap_path(minor: int) -> str:
    """The capability node with a minor number, in the container."""
    return f"/dev/nvidia-caps/nvidia-cap{minor}"


@value
class Node:
    """A device node of the host.

    Attributes:
        path: in the container ("/dev/nvidia0").
        major: its major number.
        minor: its minor number.
        mode: its permission bits.
        uid: its owner.
        gid: its group.
        host: where it is on the host.
    """

    path: str
    major: int
    minor: int
    mode: int
    uid: int
    gid: int
    host: str = ""
    _apart = ("host",)


@value
class Nodes:
    """The device nodes as they are at this moment.

    Attributes:
        usable: those that are what they should be, by path in the container.
        faults: what is wrong with each of the others, by the same.
        majors: the major numbers that the drivers have.
    """

    usable: dict[str, Node]
    faults: dict[str, str]
    majors: frozenset[int]


_LINES: Final = ("Model", "GPU UUID", "Device Minor", "Bus Location", "GPU Excluded")


def find_gpus(
    witness: Witness, config: Config, report: NvmlReport | None
) -> tuple[tuple[Gpu, ...], list[str]]:
    """The node's GPUs.

    Args:
        witness: through whom is looked.
        config: where procfs and sysfs are.
        report: what NVML said; None if it said nothing.

    Returns:
        The GPUs by index, and notes on what does not fit together, for people.
    """
    notes: list[str] = []
    directory = f"{config.proc}/driver/nvidia/gpus"
    with_mig = _gpus_with_instances(witness, config)
    told = {gpu.bus_id: gpu for gpu in report.gpus} if report is not None else {}
    found: list[Gpu] = []
    for name in sorted(witness.names(directory), key=bus_order):
        lines = witness.fields(f"{directory}/{name}/information", _LINES)
        bus_id = (lines["Bus Location"] or name).lower()
        if lines["GPU Excluded"] == "Yes":
            notes.append(f"the GPU at {bus_id} is excluded by the driver's settings")
            continue
        if not lines["Device Minor"].isdecimal():
            notes.append(f"the GPU at {bus_id} has no device minor in procfs; it is left out")
            continue
        minor = int(lines["Device Minor"])
        nvml = told.pop(bus_id, None)
        uuid = _uuid(lines["GPU UUID"])
        lost = _why_lost(report) if nvml is None else ""
        if nvml is not None and uuid and nvml.uuid != uuid:
            notes.append(f"NVML calls the GPU at {bus_id} {nvml.uuid}, procfs {uuid}; procfs holds")
            nvml = None
        found.append(
            Gpu(
                index=len(found),
                minor=minor,
                uuid=uuid or (nvml.uuid if nvml is not None else ""),
                bus_id=bus_id,
                model=lines["Model"] or (nvml.name if nvml is not None else ""),
                mig=minor in with_mig or (nvml is not None and nvml.mig),
                memory=nvml.memory if nvml is not None else None,
                drm=_drm_names(witness, config, bus_id),
                lost=lost,
                compute_capability=nvml.compute_capability if nvml is not None else "",
                brand=nvml.brand if nvml is not None else "",
            )
        )
    notes += [f"NVML tells of a GPU at {bus_id} that procfs does not have" for bus_id in told]
    return _numbered(found, report), notes


def _numbered(found: list[Gpu], report: NvmlReport | None) -> tuple[Gpu, ...]:
    """The GPUs by index: NVML's where it has said one, for that is what people see.

    NVML does not count a GPU that has no node here, as in a node that is itself a container with
    some of a machine's GPUs. The numbers it leaves over go to the others, in bus order.
    """
    told = {gpu.bus_id: gpu.index for gpu in report.gpus} if report is not None else {}
    taken = {gpu.bus_id: told[gpu.bus_id] for gpu in found if gpu.bus_id in told}
    numbers = set(taken.values())
    if len(numbers) < len(taken) or max(numbers, default=0) >= len(found):
        return tuple(found)  # they cannot all be true
    free = iter(sorted(set(range(len(found))) - numbers))
    numbered = [
        changed(gpu, index=taken[gpu.bus_id] if gpu.bus_id in taken else next(free))
        for gpu in found
    ]
    return tuple(sorted(numbered, key=lambda gpu: gpu.index))


def find_unsettled(
    witness: Witness, config: Config, gpus: Iterable[Gpu], report: NvmlReport | None
) -> str:
    """What NVML said of the GPUs that procfs does not confirm.

    Args:
        witness: through whom is looked.
        config: where procfs is.
        gpus: what :func:`find_gpus` found.
        report: what NVML said.

    Returns:
        What it is, for people; "" if procfs confirms all, or NVML said nothing.
    """
    if report is None:
        return ""
    told = {gpu.bus_id: gpu for gpu in report.gpus}
    for gpu in gpus:
        if gpu.lost:
            return f"{gpu} cannot be opened: {gpu.lost}"
        nvml = told.get(gpu.bus_id)
        if nvml is None:
            continue
        shown = _instances(witness, config, gpu.minor)
        known = {(device.gpu_instance, device.compute_instance) for device in nvml.mig_devices}
        if {pair for pair in shown if pair[1] is not None} != known:
            return f"{gpu} has other MIG devices in procfs than NVML told of"
        if nvml.mig and not shown:
            return f"{gpu} is in MIG mode, and has no instances"
    return ""


def _instances(witness: Witness, config: Config, minor: int) -> set[tuple[int, int | None]]:
    """The GPU instances of a GPU, each with its compute instances, and with None for itself."""
    directory = f"{config.proc}/driver/nvidia/capabilities/gpu{minor}/mig"
    found: set[tuple[int, int | None]] = set()
    for name in witness.names(directory):
        if not (name.startswith("gi") and name[2:].isdecimal()):
            continue
        instance = int(name[2:])
        found.add((instance, None))
        for below in witness.names(f"{directory}/{name}"):
            if below.startswith("ci") and below[2:].isdecimal():
                found.add((instance, int(below[2:])))
    return found


def _why_lost(report: NvmlReport | None) -> str:
    """Why NVML told nothing of a GPU that procfs has."""
    return report.lost[0] if report is not None and report.lost else ""


def find_mig_devices(
    config: Config, gpus: Iterable[Gpu], report: NvmlReport | None
) -> tuple[MigDevice, ...]:
    """The node's MIG devices: those that NVML tells of, with the kernel's capability nodes.

    Args:
        config: where procfs is.
        gpus: what :func:`find_gpus` found.
        report: what NVML said; without it no MIG device is known.

    Returns:
        The devices by GPU and index.
    """
    if report is None:
        return ()
    by_bus = {gpu.bus_id: gpu for gpu in gpus if gpu.mig}
    told = [(by_bus[gpu.bus_id], gpu.mig_devices) for gpu in report.gpus if gpu.bus_id in by_bus]
    if not any(devices for _, devices in told):
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
        for gpu, devices in sorted(told, key=lambda each: each[0].index)
        for device in devices
    )


def look_at_nodes(
    config: Config, gpus: Collection[Gpu], mig: Collection[MigDevice], other_dev: str | None = None
) -> Nodes:
    """Looks at every device node that a container could be given.

    Those of excluded GPUs are not usable, whatever they are.

    Args:
        config: where procfs and the device nodes are.
        gpus: the node's GPUs.
        mig: the node's MIG devices.
        other_dev: where nodes may be that the host's ``dev`` does not have: a driver container
            makes them in its own, unless it was given the host's.

    Returns:
        The nodes as they are now.
    """
    majors = read_majors(config)
    usable: dict[str, Node] = {}
    faults = {**_lost(config, gpus), **_withheld(gpus, mig)}
    elsewhere = changed(config, dev=other_dev) if other_dev is not None else None
    for path, drivers, minor in _expected(gpus, mig):
        if path in faults:
            continue
        known = {majors[driver] for driver in drivers if driver in majors}
        seen = look_at_node(config, path, known, minor, drivers[0])
        if elsewhere is not None and not isinstance(seen, Node):
            other = look_at_node(elsewhere, path, known, minor, drivers[0])
            seen = other if isinstance(other, Node) else seen
        if isinstance(seen, Node):
            usable[path] = seen
        else:
            faults[path] = seen
    of_interest = {*FRONTEND, *UVM.drivers, *CAPS, *DRM}
    return Nodes(usable, faults, frozenset(majors[d] for d in of_interest if d in majors))


def _lost(config: Config, gpus: Iterable[Gpu]) -> dict[str, str]:
    """What is wrong with the nodes of GPUs that are there no more."""
    devices = f"{config.sys}/bus/pci/devices"
    has_list = os.path.isdir(devices)
    faults = {}
    for gpu in gpus:
        if gpu.lost:
            faults[gpu.path] = f"it cannot be opened: {gpu.lost}"
        elif has_list and not os.path.lexists(f"{devices}/{gpu.bus_id}"):
            faults[gpu.path] = f"it fell off the bus: {devices} has no {gpu.bus_id}"
    return faults


def _withheld(gpus: Iterable[Gpu], mig: Collection[MigDevice]) -> dict[str, str]:
    """The nodes of excluded GPUs, by path in the container, each with what is to be said."""
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


def look_at_node(
    config: Config, path: str, majors: Collection[int], minor: int | None, driver: str
) -> Node | str:
    """The device node at a path, if it is what it should be.

    Args:
        config: where procfs and the device nodes are.
        path: in the container ("/dev/nvidia0").
        majors: the major numbers that its driver has; none if it is not loaded.
        minor: its minor number; None for any.
        driver: its driver's name in /proc/devices, for the message.

    Returns:
        The node, or in words what is wrong with it.
    """
    host = config.dev + path.removeprefix("/dev")
    try:
        # Not through a link: /dev is the host's, but a link would hide what is meant.
        seen = os.lstat(host)
    except OSError as error:
        return f"{host}: {error.strerror}"
    if not stat.S_ISCHR(seen.st_mode):
        return f"{host} is no character device"
    numbers = (os.major(seen.st_rdev), os.minor(seen.st_rdev))
    if not majors:
        return f"{config.proc}/devices lists no {driver}: its kernel module is not loaded"
    if numbers[0] not in majors or (minor is not None and numbers[1] != minor):
        wanted = f"{min(majors)}:{'*' if minor is None else minor}"
        return f"{host} is device {numbers[0]}:{numbers[1]}, not {wanted}"
    return Node(path, *numbers, stat.S_IMODE(seen.st_mode), seen.st_uid, seen.st_gid, host)


def read_majors(config: Config) -> dict[str, int]:
    """Major number by driver, of the character devices that /proc/devices lists."""
    majors: dict[str, int] = {}
    for line in (read_text(f"{config.proc}/devices") or "").splitlines():
        if line.startswith("Block devices"):
            break
        number, _, name = line.strip().partition(" ")
        if number.isdecimal():
            majors.setdefault(name.strip(), int(number))
    return majors


def _gpus_with_instances(witness: Witness, config: Config) -> set[int]:
    """The minors of the GPUs that have GPU instances.

    The compute instances are looked at as well, so that a change of them is noticed.
    """
    directory = f"{config.proc}/driver/nvidia/capabilities"
    found = set()
    for name in witness.names(directory):
        if not (name.startswith("gpu") and name[3:].isdecimal()):
            continue
        for instance in witness.names(f"{directory}/{name}/mig"):
            if instance.startswith("gi"):
                witness.names(f"{directory}/{name}/mig/{instance}")
                found.add(int(name[3:]))
    return found


def cap_minors(config: Config) -> dict[str, int]:
    """The minors of the capability nodes, by name ("gpu0/gi1/ci0/access", "config").

    Args:
        config: where procfs is.

    The file lists all that could be, thousands of lines, and never changes while the module
    is loaded; so it is read and not observed.
    """
    minors = {}
    for line in (read_text(f"{config.proc}/driver/nvidia-caps/mig-minors") or "").splitlines():
        name, _, minor = line.strip().rpartition(" ")
        if minor.isdecimal():
            minors[name] = int(minor)
    return minors


def _caps(minors: dict[str, int], gpu: int, instance: int, compute: int) -> tuple[int, ...]:
    wanted = (f"gpu{gpu}/gi{instance}/access", f"gpu{gpu}/gi{instance}/ci{compute}/access")
    found = tuple(minors[name] for name in wanted if name in minors)
    return found if len(found) == len(wanted) else ()


def _drm_names(witness: Witness, config: Config, bus_id: str) -> tuple[str, ...]:
    names = witness.names(f"{config.sys}/bus/pci/devices/{bus_id}/drm")
    return tuple(name for name in names if name.startswith(("card", "renderD")))


def bus_order(bus_id: str) -> tuple[int, ...]:
    """A PCI address as numbers: as text, domain 10000 would come before 2."""
    try:
        return tuple(int(part, 16) for part in bus_id.replace(".", ":").split(":"))
    except ValueError:
        return ()


def _uuid(text: str) -> str:
    """A UUID of procfs; "" for the question marks it has before the GPU is first used."""
    prefix, _, digits = text.partition("-")
    return f"GPU-{digits.lower()}" if prefix == "GPU" and "?" not in digits else ""
