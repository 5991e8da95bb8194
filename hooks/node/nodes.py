"""Device nodes of NVIDIA's driver that a container needs and that nobody has made.

No kernel announces these devices to udev, so their nodes are made by whoever uses the driver
first: nvidia-modprobe, a program that is root for everybody, or root's own nvidia-smi. After a
boot that may be a container; so they are made here as that program would make them, unless
``make-nodes`` says no. It grants nothing that every user of the node could not have made.

Rules
- Only nodes that are missing, of what the container may come to need: the control nodes of its
  capabilities, the GPUs, the capabilities of MIG devices. What is there is never touched.
- Numbers are those of /proc/devices and of procfs; a device whose module is not loaded gets no
  node.
- Mode and owner are those that the kernel module says (``DeviceFileMode``, ``DeviceFileUID``,
  ``DeviceFileGID``; of a capability, in its file of procfs). Where it says that nodes are not
  to be made (``ModifyDeviceFiles: 0``), none are.
- A node appears with its mode and owner, or not at all, and takes no other's place: any number
  of shims may make it at once.
- What could not be made is told in the record; the grant then says what is missing. They stay,
  as they are the host's.

IMEX channels are not made: which ones a node has is for the IMEX service or for the resource
driver to say.

Source: nvidia-modprobe, modprobe-utils/nvidia-modprobe-utils.c; kernel-open/nvidia/nv-procfs.c
and nv-caps.c of NVIDIA's open kernel modules.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING, Final

from api.values import value
from hooks.edits.capabilities import FRONTEND, MODESET, nodes_of
from hooks.node.gpus import CAPS, cap_path, read_majors
from hooks.node.modules import is_loaded
from hooks.node.parameters import may_make_nodes, node_owner, parse_parameters
from hooks.node.witness import read_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hooks.config import Config
    from hooks.node.inventory import Inventory

__all__ = ["MadeNodes", "Wanted", "capability_mode", "make_all", "make_missing"]

_CAPABILITY_MODE: Final = 0o444
_PERMISSIONS: Final = 0o777


@value
class MadeNodes:
    """What came of making nodes.

    Attributes:
        made: paths of those that were made, on the host.
        failed: what stood in the way, by the path.
        found: paths of devices that were not there when the inventory's nodes were looked at, and
            are now: another shim was as quick, or this one has made them for an earlier attempt.
    """

    made: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    found: tuple[str, ...] = ()


@value
class Wanted:
    """A node that is to be there.

    Attributes:
        path: in the container ("/dev/nvidia0").
        drivers: names of its driver in /proc/devices, of which one has its major number.
        minor: its minor number.
        mode: its permission bits.
        uid: its owner.
        gid: its group.
    """

    path: str
    drivers: tuple[str, ...]
    minor: int
    mode: int
    uid: int
    gid: int


def make_missing(config: Config, inventory: Inventory, capabilities: Iterable[str]) -> MadeNodes:
    """Makes the nodes that are missing.

    Args:
        config: where procfs, sysfs and the device nodes are.
        inventory: what the node has.
        capabilities: that the container has asked for.

    Returns:
        What was done. If anything was made or found, the inventory's nodes have to be looked at
        anew.
    """
    faults = inventory.nodes.faults
    if not config.make_nodes or not faults or not inventory.parameters:
        return MadeNodes()
    parameters = parse_parameters(inventory.parameters)
    if not may_make_nodes(parameters):
        return MadeNodes()
    owner = node_owner(parameters)
    wanted = [n for n in _wanted(config, inventory, capabilities, owner) if n.path in faults]
    return make_all(config, wanted) if wanted else MadeNodes()


def make_all(config: Config, wanted: Iterable[Wanted]) -> MadeNodes:
    """Makes those of some nodes that are not there and whose driver is loaded.

    Args:
        config: where procfs and the device nodes are.
        wanted: the nodes.

    Returns:
        What was done.
    """
    majors = read_majors(config)
    made: list[str] = []
    failed: list[tuple[str, str]] = []
    found: list[str] = []
    for node in wanted:
        host = config.dev + node.path.removeprefix("/dev")
        major = next((majors[driver] for driver in node.drivers if driver in majors), None)
        if major is None:
            continue
        try:
            if not os.path.lexists(host) and _make(host, node, os.makedev(major, node.minor)):
                made.append(host)
            elif _is_device(host):
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
    """The permission bits that a capability's file of procfs says its node is to have.

    Args:
        told: the file, parsed.
    """
    text = told.get("DeviceFileMode", "")
    number = int(text) if text.isascii() and text.isdecimal() else _CAPABILITY_MODE
    return number if number <= _PERMISSIONS else _CAPABILITY_MODE


def _is_device(host: str) -> bool:
    return stat.S_ISCHR(os.lstat(host).st_mode)


def _make(host: str, node: Wanted, number: int) -> bool:
    """Makes one node; whether it did, and not somebody else at the same moment."""
    directory, name = os.path.split(host)
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o755)
    aside = os.path.join(directory, f".nvshim-{os.urandom(8).hex()}")
    try:
        os.mknod(aside, stat.S_IFCHR | 0o600, number)
        os.chown(aside, node.uid, node.gid)
        os.chmod(aside, node.mode)
        try:
            os.link(aside, os.path.join(directory, name))
        except FileExistsError:
            return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
    return True
