"""What a container needs and the host lacks: kernel modules, device nodes and links to them.

After a boot nothing may have used the GPUs yet: the module for unified memory and perhaps the
driver's own are not loaded, and no kernel announces these devices to udev, so their nodes are made
by the driver's first user (nvidia-modprobe, which is root for everybody, or root's nvidia-smi).
That may be a container. NVIDIA's tools load and make what is missing on demand, and so does this,
unless ``load-kernel-modules`` or ``make-nodes`` says no. It grants nothing that every user of the
node could not have made.

Modules
- Only what the container needs: ``nvidia``, for CUDA ``nvidia-uvm``, for graphics and display
  ``nvidia-modeset``. What sysfs shows is loaded is not loaded again.
- Only on a machine with a GPU of NVIDIA's on its PCI bus: elsewhere modprobe could only fail.
- The operator's modprobe.d holds: a module that is blacklisted by ``install … /bin/false``, as on
  a node whose GPUs are for virtual machines, is not loaded.
- A driver root other than "/" is where its modules are looked for, too.
- A module that cannot be loaded is not an error here: its user reports what is missing.
- The engine runs nothing. The caller runs each command to its end, one after the other, and has
  each end within :data:`TIMEOUT`. After one that does not, and without ``nvidia``, it tries no
  more.

Nodes
- Only nodes that are missing or stale, of what the container may come to need: the control nodes
  of its capabilities, the GPUs, the capabilities of MIG devices. A node is stale if it has another
  number than the kernel now says: a module that is loaded again may get another major number
  (nvidia-uvm's is dynamic), and with the old node CUDA is dead. It is replaced, as nvidia-modprobe
  does. What is no device is never touched.
- Numbers are those of /proc/devices and of procfs; a device whose module is not loaded gets no
  node. IMEX channels are not made, only replaced: the IMEX service or the resource driver decides
  on them.
- Mode and owner are those of the module's parameters, lines ``Name: value`` of
  /proc/driver/nvidia/params: ``DeviceFileMode``, ``DeviceFileUID``, ``DeviceFileGID`` (of a
  capability, in its file of procfs). With ``ModifyDeviceFiles: 0`` none are made.
- A node appears with its mode and owner, or not at all, and takes only a stale one's place: any
  number of shims may make it at once.
- The record lists what could not be made; the grant then says what is missing. They stay,
  as they are the host's.

In a container NVIDIA's libraries must not make nodes: a privileged one, or one whose process may
make nodes, would get one for every GPU of the machine as soon as a CUDA program starts. So where
``ModifyDeviceFiles`` is 1, the container reads the same parameters with 0 in it, read-only
(:mod:`shim.rootfs.proc_cover` mounts it). The other files below /proc/driver/nvidia stay as they
are: they give no access, a container sees the same GPUs below /sys/bus/pci/devices, and what is
mounted over a directory of procfs hides what the module puts there later (capabilities of MIG
devices that are made while the container runs).

Links
- Only for nodes that a container gets, and only where the node is what it should be.
- A link is right if it leads to a character device of the numbers in its name. A right one is
  not touched. A wrong or dangling one (of a driver that has had other numbers)
  is replaced. What is no link is left alone.
- Its target is the one that udev would write: ``../nvidia0``; or the whole path of a node that is
  in a driver container's own /dev alone. Each is made or replaced in one step, so that any number
  of shims may do it at once.
- They stay when the container goes, as udev's do: they name a device of the host, and another
  container may need them.
- Where they cannot be made the container starts all the same, and its record says so: without
  systemd's cgroups nothing needs them.

The links /dev/char/MAJOR:MINOR: when systemd makes a container's cgroup, the low-level runtime
names the devices by such names. Up to version 252 or so, one that does not exist on the host is
left out: the container works, because the runtime allows the device itself as well, until the next
``systemctl daemon-reload``, when systemd writes the cgroup's rules again from these names, and the
GPU answers EPERM from then on. udev makes these links for devices that the kernel announces;
nothing makes those of NVIDIA's nodes.

Source: nvidia-modprobe, modprobe-utils/nvidia-modprobe-utils.c; libnvidia-container, src/nvc.c;
kernel-open/nvidia/nv-procfs.c and nv-caps.c of NVIDIA's open kernel modules; modprobe(8);
Documentation/ABI/testing/sysfs-bus-pci of the kernel.
systemd.resource-control(5), DeviceAllow=; runc libcontainer/cgroups/devices.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from api.values import dataclass
from hooks.config import Config
from hooks.node.capabilities import FRONTEND, MODESET, UVM, nodes_of
from hooks.node.device_nodes import (
    CAPS,
    IMEX_DIRECTORY,
    IMEX_DRIVER,
    MadeNodes,
    cap_path,
    read_majors,
)
from hooks.node.fingerprint import read_line, read_names, read_text
from hooks.node.inventory import Inventory
from hooks.plan import Device, ProcFile

TIMEOUT: Final = 60.0
"""Seconds that a command may take: a module wakes every GPU of the node."""

_VENDOR: Final = "0x10de"
_DISPLAY: Final = "0x03"
DRIVER: Final = "nvidia"
"""The module that all others need."""


def load_commands(config: Config, capabilities: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """The commands that load missing modules: argument lists, in order."""
    if not config.load_modules:
        return ()
    missing = [name for name in _needed(capabilities) if not is_loaded(config, name)]
    if not missing or not _has_gpu(config):
        return ()
    root = config.driver_root or "/"
    where = () if root == "/" else ("-d", root)
    return tuple(("modprobe", *where, "--", name) for name in missing)


def is_loaded(config: Config, module: str) -> bool:
    """Whether a module is loaded or built in."""
    return os.path.isdir(f"{config.sys}/module/{module.replace('-', '_')}")


def _needed(capabilities: Iterable[str]) -> list[str]:
    nodes = nodes_of(capabilities)
    needed = [DRIVER]
    if UVM in nodes:
        needed.append("nvidia-uvm")
    if MODESET in nodes:
        needed.append("nvidia-modeset")
    return needed


def _has_gpu(config: Config) -> bool:
    bus = f"{config.sys}/bus/pci/devices"
    for name in read_names(bus) or ():
        device = f"{bus}/{name}"
        if read_line(f"{device}/vendor") == _VENDOR and read_line(f"{device}/class").startswith(
            _DISPLAY
        ):
            return True
    return False


PATH: Final = "/proc/driver/nvidia/params"

_MODIFY: Final = "ModifyDeviceFiles"
_MODE, _UID, _GID = "DeviceFileMode", "DeviceFileUID", "DeviceFileGID"
_DEFAULT_MODE: Final = 0o666
_PERMISSIONS: Final = 0o777
_MOST_ID: Final = 2**32 - 2


def parse_parameters(text: str) -> dict[str, str]:
    """The parameters by name; lines without a colon are skipped."""
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in lines if colon}


def may_make_nodes(parameters: Mapping[str, str]) -> bool:
    """Whether others than the administrator may make the driver's nodes; so it is by default."""
    return parameters.get(_MODIFY, "1") != "0"


def node_owner(parameters: Mapping[str, str]) -> tuple[int, int, int]:
    """Permission bits, owner and group of the nodes to make."""
    mode = _number(parameters, _MODE, _DEFAULT_MODE)
    return (
        mode if mode <= _PERMISSIONS else _DEFAULT_MODE,
        _number(parameters, _UID, 0),
        _number(parameters, _GID, 0),
    )


def without_node_making(text: str) -> ProcFile | None:
    """What a container is to read in place of the parameters.

    Args:
        text: the file's content; "" if it does not exist.

    Returns:
        The file to be covered; None if it says already that nodes are not to be made.
    """
    lines = text.splitlines(keepends=True)
    shown = [_MODIFY_NOT if _is_modify(line) else line for line in lines]
    if shown == lines:
        return None
    return ProcFile(PATH, "".join(shown).encode(), "keeps the driver from making nodes")


_MODIFY_NOT: Final = f"{_MODIFY}: 0\n"


def _is_modify(line: str) -> bool:
    name, _, value = line.partition(":")
    return name.strip() == _MODIFY and value.strip() != "0"


def _number(parameters: Mapping[str, str], name: str, otherwise: int) -> int:
    text = parameters.get(name, "")
    number = (
        int(text)
        if text.isascii() and text.isdecimal() and len(text) <= len("4294967295")
        else otherwise
    )
    return number if number <= _MOST_ID else otherwise


_CAPABILITY_MODE: Final = 0o444


@dataclass(frozen=True, slots=True)
class Wanted:
    """A node that should exist."""

    path: str  # in the container ("/dev/nvidia0")
    # names of its driver in /proc/devices, of which one has its major number
    drivers: tuple[str, ...]
    minor: int
    mode: int
    uid: int
    gid: int


def make_missing(config: Config, inventory: Inventory, capabilities: Iterable[str]) -> MadeNodes:
    """Make the nodes that are missing or stale.

    Returns:
        What was done. If anything was made or found, the inventory's nodes have to be read again.
    """
    faults = inventory.nodes.faults
    channels = stale_channels(config)
    if not config.make_nodes or not (faults or channels) or not inventory.parameters:
        return MadeNodes()
    parameters = parse_parameters(inventory.parameters)
    if not may_make_nodes(parameters):
        return MadeNodes()
    owner = node_owner(parameters)
    wanted = [n for n in _wanted(config, inventory, capabilities, owner) if n.path in faults]
    wanted += channels
    return make_all(config, wanted) if wanted else MadeNodes()


def make_all(config: Config, wanted: Iterable[Wanted]) -> MadeNodes:
    """Make the nodes that are missing or stale and whose driver is loaded."""
    majors = read_majors(config)
    made: list[str] = []
    failed: list[tuple[str, str]] = []
    found: list[str] = []
    for node in wanted:
        host = config.dev + node.path.removeprefix("/dev")
        major = next((majors[driver] for driver in node.drivers if driver in majors), None)
        if major is None:
            continue
        number = os.makedev(major, node.minor)
        try:
            before = _device_at(host)
            if before not in {number, _NO_DEVICE} and _make(host, node, number, before):
                made.append(host)
            elif _device_at(host) == number:
                found.append(host)
        except OSError as error:
            failed.append((host, error.strerror or str(error)))
    return MadeNodes(tuple(made), tuple(failed), tuple(found))


def _wanted(
    config: Config,
    inventory: Inventory,
    capabilities: Iterable[str],
    owner: tuple[int, int, int],
) -> Iterator[Wanted]:
    for control in nodes_of(capabilities):
        # The driver's own major is there without this module, and the node would be dead.
        if control.minor is not None and (
            control is not MODESET or is_loaded(config, "nvidia-modeset")
        ):
            yield Wanted(control.path, control.drivers, control.minor, *owner)
    for gpu in inventory.gpus:
        if gpu.excluded:
            continue
        yield Wanted(gpu.path, FRONTEND, gpu.minor, *owner)
    for device in inventory.mig_devices:
        gpu = inventory.gpus[device.gpu]
        if gpu.excluded:
            continue
        below = f"{config.proc}/driver/nvidia/capabilities/gpu{gpu.minor}/mig"
        files = (
            f"{below}/gi{device.gpu_instance}/access",
            f"{below}/gi{device.gpu_instance}/ci{device.compute_instance}/access",
        )
        for minor, file in zip(device.caps, files, strict=False):
            if cap_path(minor) not in inventory.nodes.faults:
                continue
            told = parse_parameters(read_text(file) or "")
            if told.get("DeviceFileModify", "1") != "0":
                mode = capability_mode(told)
                yield Wanted(cap_path(minor), CAPS, minor, mode, 0, 0)


def capability_mode(told: Mapping[str, str]) -> int:
    """The permission bits of a capability's node, by its file of procfs."""
    text = told.get("DeviceFileMode", "")
    number = int(text) if text.isascii() and text.isdecimal() else _CAPABILITY_MODE
    return number if number <= _PERMISSIONS else _CAPABILITY_MODE


def stale_channels(config: Config) -> list[Wanted]:
    """The IMEX channels whose nodes have another number than the kernel says."""
    directory = config.dev + IMEX_DIRECTORY.removeprefix("/dev")
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    major = read_majors(config).get(IMEX_DRIVER)
    if major is None:
        return []
    stale = []
    for name in names:
        channel = name.removeprefix("channel")
        if name == channel or not (channel.isascii() and channel.isdecimal()):
            continue
        try:
            seen = os.lstat(f"{directory}/{name}")
        except OSError:
            continue
        if stat.S_ISCHR(seen.st_mode) and seen.st_rdev != os.makedev(major, int(channel)):
            owner = (stat.S_IMODE(seen.st_mode), seen.st_uid, seen.st_gid)
            path = f"{IMEX_DIRECTORY}/{name}"
            stale.append(Wanted(path, (IMEX_DRIVER,), int(channel), *owner))
    return stale


_NO_DEVICE: Final = -1


def _device_at(host: str) -> int | None:
    """The number of the device at a path; None if nothing is there, -1 if that is no device."""
    try:
        seen = os.lstat(host)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return seen.st_rdev if stat.S_ISCHR(seen.st_mode) else _NO_DEVICE


def _make(host: str, node: Wanted, number: int, before: int | None) -> bool:
    """Make one node; False if another process made it at the same moment.

    Args:
        before: the number of the stale one in its place; None if there is none.
    """
    directory = os.path.dirname(host)
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o755)
    aside = os.path.join(directory, f".nvshim-{os.urandom(8).hex()}")
    try:
        os.mknod(aside, stat.S_IFCHR | 0o600, number)
        os.chown(aside, node.uid, node.gid)
        os.chmod(aside, node.mode)
        if before is not None:
            os.rename(aside, host)
            return True
        try:
            os.link(aside, host)
        except FileExistsError:
            return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
    return True


_DIRECTORY: Final = "char"


@dataclass(frozen=True, slots=True)
class CharLinks:
    """What came of making links."""

    made: tuple[str, ...] = ()  # the names of those that were made or replaced ("195:0")
    # what stood in the way, for display, by the names of those that are not right
    failed: tuple[tuple[str, str], ...] = ()


def link_nodes(
    dev: str, devices: Iterable[Device], hosts: Mapping[str, str] | None = None
) -> CharLinks:
    """Make sure that each device's node has its link; a failure is not an error.

    Args:
        hosts: where the nodes are on the host that are not below ``dev``, by path in the
            container.
    """
    made: list[str] = []
    failed: list[tuple[str, str]] = []
    for device in devices:
        name = f"{device.major}:{device.minor}"
        try:
            if _make_link(dev, device, name, (hosts or {}).get(device.path, "")):
                made.append(name)
        except OSError as error:
            failed.append((name, f"{error.filename or dev}: {error.strerror}"))
    return CharLinks(tuple(made), tuple(failed))


def is_linked(dev: str, device: Device) -> bool:
    """Whether a device has a link that is right."""
    link = os.path.join(dev, _DIRECTORY, f"{device.major}:{device.minor}")
    return _is_numbered(link, os.makedev(device.major, device.minor))


def _make_link(dev: str, device: Device, name: str, host: str) -> bool:
    """Make the link of one node unless it has a right one; return whether it was made."""
    node = device.path.removeprefix("/dev/")
    number = os.makedev(device.major, device.minor)
    directory = os.path.join(dev, _DIRECTORY)
    link = os.path.join(directory, name)
    if _is_numbered(link, number):
        return False
    below = os.path.join(dev, node)
    place = host or below
    if not _is_numbered(place, number, follow=False):
        raise OSError(errno.ENODEV, f"is not device {name} any more", place)
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o755)
    target = os.path.join("..", node) if place == below else place
    try:
        os.symlink(target, link)
    except FileExistsError:
        return _replace_link(link, target, number)
    return True


def _replace_link(link: str, target: str, number: int) -> bool:
    """Replace a link that is wrong; return whether it was replaced."""
    if _is_numbered(link, number):
        return False  # another shim's, made meanwhile
    if not os.path.islink(link):
        raise FileExistsError(errno.EEXIST, "is no link", link)
    aside = os.path.join(os.path.dirname(link), f".nvshim-{os.urandom(8).hex()}")
    os.symlink(target, aside)
    try:
        os.rename(aside, link)
    except OSError:
        os.unlink(aside)
        raise
    return True


def _is_numbered(path: str, number: int, *, follow: bool = True) -> bool:
    try:
        seen = os.stat(path, follow_symlinks=follow)
    except OSError:
        return False
    return stat.S_ISCHR(seen.st_mode) and seen.st_rdev == number
