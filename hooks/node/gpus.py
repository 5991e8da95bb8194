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
from hooks.node.nvml import NvmlGpu
from hooks.node.witness import read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

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
        lost: why it is lost (:mod:`hooks.node.nvml_asking`); "" if it is not, or nobody asked.
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
        lost: the nodes of lost GPUs, by path in the container.
    """

    usable: dict[str, Node]
    faults: dict[str, str]
    majors: frozenset[int]
    lost: frozenset[str] = frozenset()


_LINES: Final = ("Model", "GPU UUID", "Device Minor", "Bus Location", "GPU Excluded")


@value
class FoundGpus:
    """The GPUs of a node, from procfs and NVML.

    Attributes:
        gpus: by index.
        told: what NVML said of each, by the PCI address that procfs has.
        notes: GPUs that procfs has and that are left out, for people.
        conflicts: what NVML and procfs say differently, for people.
    """

    gpus: tuple[Gpu, ...]
    told: dict[str, NvmlGpu]
    notes: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()


_NOTHING_TOLD: Final = NvmlGpu(index=-1)


def find_gpus(witness: Witness, config: Config, report: NvmlReport | None) -> FoundGpus:
    """The node's GPUs.

    Args:
        witness: through whom is looked.
        config: where procfs, sysfs and the device nodes are.
        report: what NVML said; None if it said nothing.
    """
    listed, notes = _listed(witness, config)
    told, others = _match(config, listed, report)
    with_mig = _gpus_with_instances(witness, config)
    conflicts: list[str] = []
    found = []
    for gpu in listed:
        nvml = told.get(gpu.bus_id, _NOTHING_TOLD)
        conflicts += _conflicts(gpu, nvml)
        if gpu.uuid and nvml.uuid not in {"", gpu.uuid}:  # it is about another GPU
            nvml = told[gpu.bus_id] = NvmlGpu(nvml.index)
        lost = nvml.lost
        if report is not None and gpu.bus_id not in told and _has_node(config, gpu):
            lost = "NVML does not count it"
            conflicts.append(f"procfs has a GPU at {gpu.bus_id}, and NVML does not count it")
        found.append(
            changed(
                gpu,
                uuid=gpu.uuid or nvml.uuid,
                model=gpu.model or nvml.name,
                mig=gpu.minor in with_mig or nvml.mig,
                memory=nvml.memory,
                drm=_drm_names(witness, config, gpu.bus_id),
                lost=lost,
                compute_capability=nvml.compute_capability,
                brand=nvml.brand,
            )
        )
    conflicts += [f"NVML has {_named(nvml)}, and procfs does not" for nvml in others]
    return FoundGpus(_numbered(found, told), told, tuple(notes), tuple(conflicts))


def _listed(witness: Witness, config: Config) -> tuple[list[Gpu], list[str]]:
    """The GPUs that procfs has, in bus order; and why each of the others is left out."""
    notes: list[str] = []
    found: list[Gpu] = []
    directory = f"{config.proc}/driver/nvidia/gpus"
    for name in sorted(witness.names(directory), key=bus_order):
        lines = witness.fields(f"{directory}/{name}/information", _LINES)
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
    """Which GPU of procfs each of NVML's is, by PCI address; and those that are none of them.

    The PCI address decides, then the UUID, then the minor. A lost GPU often tells none of these;
    such GPUs are taken for those that are left, in bus order, which is NVML's as well.
    """
    left, told = list(listed), {}
    others = list(report.gpus) if report is not None else []

    def take(is_same: Callable[[Gpu, NvmlGpu], bool]) -> None:
        for gpu in tuple(left):
            nvml = next((each for each in others if is_same(gpu, each)), None)
            if nvml is not None:
                told[gpu.bus_id] = nvml
                left.remove(gpu)
                others.remove(nvml)

    take(lambda gpu, nvml: gpu.bus_id == nvml.bus_id)
    take(lambda gpu, nvml: bool(gpu.uuid) and gpu.uuid == nvml.uuid)
    take(lambda gpu, nvml: not nvml.bus_id and not nvml.uuid and gpu.minor == nvml.minor)
    # NVML counts no GPU that has no node here.
    left = [gpu for gpu in left if _has_node(config, gpu)] or left
    take(lambda _, nvml: not nvml.bus_id and not nvml.uuid and nvml.minor is None)
    return told, others


def _has_node(config: Config, gpu: Gpu) -> bool:
    return os.path.lexists(config.dev + gpu.path.removeprefix("/dev"))


def _conflicts(gpu: Gpu, nvml: NvmlGpu) -> Iterator[str]:
    """What NVML says otherwise than procfs, whose word counts."""
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


def _numbered(found: list[Gpu], told: Mapping[str, NvmlGpu]) -> tuple[Gpu, ...]:
    """The GPUs by index: NVML's where it has said one, for that is what people see.

    NVML does not count a GPU that has no node here, as in a node that is itself a container with
    some of a machine's GPUs. The numbers it leaves over go to the others, in bus order.
    """
    numbers = {nvml.index for nvml in told.values()}
    if len(numbers) < len(told) or max(numbers, default=0) >= len(found):
        return tuple(found)  # they cannot all be true
    free = iter(sorted(set(range(len(found))) - numbers))
    numbered = [
        changed(gpu, index=told[gpu.bus_id].index if gpu.bus_id in told else next(free))
        for gpu in found
    ]
    return tuple(sorted(numbered, key=lambda gpu: gpu.index))


def find_unsettled(witness: Witness, config: Config, found: FoundGpus) -> tuple[str, ...]:
    """What NVML said of the GPUs that procfs does not confirm.

    Args:
        witness: through whom is looked.
        config: where procfs is.
        found: what :func:`find_gpus` found.

    Returns:
        What it is, for people; nothing if procfs confirms all, or NVML said nothing.
    """
    return tuple(filter(None, (_unsettled(witness, config, gpu, found) for gpu in found.gpus)))


def _unsettled(witness: Witness, config: Config, gpu: Gpu, found: FoundGpus) -> str:
    if gpu.lost:
        return f"{gpu} is lost: {gpu.lost}"
    nvml = found.told.get(gpu.bus_id)
    if nvml is None:
        return ""
    shown = _instances(witness, config, gpu.minor)
    known = {(device.gpu_instance, device.compute_instance) for device in nvml.mig_devices}
    if {pair for pair in shown if pair[1] is not None} != known:
        return f"{gpu} has other MIG devices in procfs than NVML told of"
    return f"{gpu} is in MIG mode, and has no instances" if nvml.mig and not shown else ""


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


def find_mig_devices(config: Config, found: FoundGpus) -> tuple[MigDevice, ...]:
    """The node's MIG devices: those that NVML tells of, with the kernel's capability nodes.

    Args:
        config: where procfs is.
        found: what :func:`find_gpus` found; without NVML's word no MIG device is known.

    Returns:
        The devices by GPU and index.
    """
    told = [
        (gpu, found.told[gpu.bus_id].mig_devices)
        for gpu in found.gpus
        if gpu.mig and gpu.bus_id in found.told
    ]
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
        for gpu, devices in told
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
    lost = _lost(config, gpus)
    faults = {**lost, **_withheld(gpus, mig)}
    elsewhere = changed(config, dev=other_dev) if other_dev is not None else None
    for path, drivers, minor in _expected(gpus, mig):
        if path in faults:
            continue
        its = {majors[driver] for driver in drivers if driver in majors}
        seen = look_at_node(config, path, its, minor, drivers[0])
        if elsewhere is not None and not isinstance(seen, Node):
            other = look_at_node(elsewhere, path, its, minor, drivers[0])
            seen = other if isinstance(other, Node) else seen
        if isinstance(seen, Node):
            usable[path] = seen
        else:
            faults[path] = seen
    of_interest = {*FRONTEND, *UVM.drivers, *CAPS, *DRM}
    known = frozenset(majors[d] for d in of_interest if d in majors)
    return Nodes(usable, faults, known, frozenset(lost))


def _lost(config: Config, gpus: Iterable[Gpu]) -> dict[str, str]:
    """What is wrong with the nodes of GPUs that are there no more."""
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
