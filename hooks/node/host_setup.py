"""Create what a container needs and the host lacks: modules, device nodes, links to them.

Until something uses the GPUs after a boot, the module for unified memory, and perhaps the driver's
own, are not loaded. The kernel does not announce these devices to udev, so the driver's first user
creates their nodes (nvidia-modprobe, which is setuid root, or root's nvidia-smi). That user may be
a container. Like NVIDIA's tools, this module loads and creates what is missing, unless
``load-kernel-modules`` or ``make-nodes`` forbids it. It grants nothing that any user of the node
could not have created.

Modules
- Only the container's modules are loaded: ``nvidia``, for CUDA ``nvidia-uvm``, for graphics and
  display ``nvidia-modeset``. A module that sysfs shows as loaded is not loaded again.
- This requires an NVIDIA GPU on the PCI bus: elsewhere modprobe could only fail.
- The operator's modprobe.d applies: a module that is blacklisted with ``install … /bin/false``, as
  on a node whose GPUs are for virtual machines, is not loaded.
- If the driver root is not "/", it is searched for modules, too.
- Failure to load a module is not an error here: its user reports what is missing.
- The engine runs nothing. The caller runs the commands one by one, and ends each after
  :data:`TIMEOUT`. After a timeout, or if ``nvidia`` is not loaded, it stops.

Nodes
- Only missing or stale nodes are created, and only those that the container may need: the control
  nodes of its capabilities, the GPUs, the capabilities of MIG devices. A node is stale if its
  number is not the kernel's: a module that is loaded again may get another major number
  (nvidia-uvm's is dynamic), and CUDA does not work with the old node. Like nvidia-modprobe, this
  replaces it. A file that is not a device is never changed.
- Numbers are those of /proc/devices and of procfs. A device whose module is not loaded gets no
  node. IMEX channels are only replaced: the IMEX service or the resource driver creates them.
- Mode and owner come from the module's parameters, lines ``Name: value`` of
  /proc/driver/nvidia/params: ``DeviceFileMode``, ``DeviceFileUID``, ``DeviceFileGID`` (a
  capability's mode comes from its file in procfs). With ``ModifyDeviceFiles: 0`` no nodes are
  created.
- A node appears with its mode and owner, or not at all, and replaces only a stale one. So any
  number of shims may create it at the same time.
- The record lists nodes that could not be created; the grant reports missing ones. Created nodes
  stay, because they belong to the host.

In a container, NVIDIA's libraries must not create nodes. If the container is privileged, or may
create nodes, they would create one for every GPU of the machine when a CUDA program starts. So if
``ModifyDeviceFiles`` is 1, the container reads 0 instead, from a read-only copy
(:mod:`shim.rootfs.proc_cover` mounts it). The other files below /proc/driver/nvidia do not change:
they give no access, and a container sees the same GPUs below /sys/bus/pci/devices. A mount over a
procfs directory would hide later additions (capabilities of MIG devices created while the container
runs).

Links
- Links are created only to correct nodes that a container gets.
- A correct link leads to a character device with the numbers in its name, and stays. A wrong or
  dangling one (from a driver with other numbers) is replaced. A file that is not a link stays.
- Its target is the same as udev's: ``../nvidia0``; or the whole path of a node that exists only in
  a driver container's own /dev. Each link is created or replaced in one step, so any number of
  shims may do it at the same time.
- Like udev's links, they outlive the container: they name a host device, and another container may
  need them.
- If they cannot be created, the container still starts, and its record says so: without systemd's
  cgroups nothing needs them.

The links are /dev/char/MAJOR:MINOR. When systemd manages a container's cgroup, the low-level
runtime identifies devices by these names. Up to about version 252, systemd ignores a name that does
not exist on the host. At first the container works, because the runtime also allows the device
itself. But the next ``systemctl daemon-reload`` rewrites the cgroup's rules from these names, and
from then on the GPU answers EPERM. udev creates these links for devices that the kernel announces,
but not for NVIDIA's nodes.

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
"""A command's limit in seconds, since a module wakes every GPU of the node."""

_VENDOR: Final = "0x10de"
_DISPLAY: Final = "0x03"
DRIVER: Final = "nvidia"
"""The module that all others depend on."""


def load_commands(config: Config, capabilities: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Return the commands that load missing modules: argument lists, in order."""
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
    """Return the parameters by name; lines without a colon are skipped."""
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in lines if colon}


def may_make_nodes(parameters: Mapping[str, str]) -> bool:
    """Whether programs may create the driver's nodes, not only the administrator."""
    return parameters.get(_MODIFY, "1") != "0"


def node_owner(parameters: Mapping[str, str]) -> tuple[int, int, int]:
    """Return permission bits, owner and group of new nodes."""
    mode = _number(parameters, _MODE, _DEFAULT_MODE)
    return (
        mode if mode <= _PERMISSIONS else _DEFAULT_MODE,
        _number(parameters, _UID, 0),
        _number(parameters, _GID, 0),
    )


def without_node_making(text: str) -> ProcFile | None:
    """Return a replacement of the parameters that forbids a container to create nodes.

    Args:
        text: the file's content; "" if it does not exist.

    Returns:
        The replacement; None if the file already forbids creating nodes.
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
    # names of its driver in /proc/devices; one has its major number
    drivers: tuple[str, ...]
    minor: int
    mode: int
    uid: int
    gid: int


def make_missing(config: Config, inventory: Inventory, capabilities: Iterable[str]) -> MadeNodes:
    """Create the nodes that are missing or stale.

    Returns:
        What was done. If nodes were created or found, read the inventory's nodes again.
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
    """Create the missing or stale nodes whose driver is loaded."""
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
        # The driver's own major number exists without this module, but the node would not work.
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
    """Return the permission bits of a capability's node, from its procfs file."""
    text = told.get("DeviceFileMode", "")
    number = int(text) if text.isascii() and text.isdecimal() else _CAPABILITY_MODE
    return number if number <= _PERMISSIONS else _CAPABILITY_MODE


def stale_channels(config: Config) -> list[Wanted]:
    """Return the IMEX channels whose nodes do not have the kernel's number."""
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
    """Return the device number at a path; None if nothing is there, -1 for other files."""
    try:
        seen = os.lstat(host)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return seen.st_rdev if stat.S_ISCHR(seen.st_mode) else _NO_DEVICE


def _make(host: str, node: Wanted, number: int, before: int | None) -> bool:
    """Create one node; return False if another process created it at the same moment.

    Args:
        before: the number of the stale node in its place; None for none.
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
    """The result of creating links."""

    made: tuple[str, ...] = ()  # the names of created or replaced links ("195:0")
    # why links are wrong, for display, by name
    failed: tuple[tuple[str, str], ...] = ()


def link_nodes(
    dev: str, devices: Iterable[Device], hosts: Mapping[str, str] | None = None
) -> CharLinks:
    """Make sure that each device's node has its link; failures are not errors.

    Args:
        hosts: the host paths of nodes outside of ``dev``, by path in the container.
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
    """Whether a device has a correct link."""
    link = os.path.join(dev, _DIRECTORY, f"{device.major}:{device.minor}")
    return _is_numbered(link, os.makedev(device.major, device.minor))


def _make_link(dev: str, device: Device, name: str, host: str) -> bool:
    """Create the link of one node unless it has a correct one; return whether it did."""
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
    """Replace a wrong link; return whether it did."""
    if _is_numbered(link, number):
        return False  # another shim has created one
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
