"""The device nodes of a simulated node.

``mknod`` as root works without a driver; opening such a node answers ENXIO. What is told apart
by looking at nodes (type, numbers, mode, owner) is as on a real node: 195:N for GPU N, 195:255
and 195:254 for control and modeset, numbers of the kernel's choice for unified memory and for
capabilities, 226 for DRM. On a machine that has a driver the nodes would reach its GPUs.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from integration.errors import DevicesForbidden
from integration.simulated.capabilities import CONFIG_MINOR, MONITOR_MINOR, access_minor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from integration.simulated.scenario import Scenario

NVIDIA_MAJOR: Final = 195
DRM_MAJOR: Final = 226
CONTROL_MINOR: Final = 255
MODESET_MINOR: Final = 254

# From where the kernel takes majors for those who ask for any: downwards, first the low range.
# Source: include/linux/fs.h, CHRDEV_MAJOR_DYN_*.
_DYNAMIC: Final = (*range(254, 233, -1), *range(511, 383, -1))

_NULL: Final = os.makedev(1, 3)


@dataclass(frozen=True, slots=True)
class Majors:
    """Majors that the kernel would have chosen.

    Attributes:
        caps: of nvidia-caps.
        imex: of nvidia-caps-imex-channels.
        uvm: of nvidia-uvm.
    """

    caps: int
    imex: int
    uvm: int

    @classmethod
    def free_in(cls, proc_devices: str) -> Majors:
        """Choose majors that no driver of this machine has.

        Args:
            proc_devices: the content of /proc/devices.

        Returns:
            Three majors.
        """
        free = free_majors(proc_devices)
        return cls(next(free), next(free), next(free))


def free_majors(proc_devices: str) -> Iterator[int]:
    """Majors that no driver has, in the order in which the kernel gives them away.

    Args:
        proc_devices: the content of /proc/devices.
    """
    taken = {int(number) for number in re.findall(r"^ *(\d+) ", proc_devices, re.MULTILINE)}
    return (major for major in _DYNAMIC if major not in taken)


@dataclass(frozen=True, slots=True)
class Node:
    """One device node: its path below ``dev``, numbers, permission bits and group."""

    path: str
    major: int
    minor: int
    mode: int = 0o666
    gid: int = 0


def nodes(scenario: Scenario, majors: Majors) -> list[Node]:
    """The device nodes of a scenario.

    Args:
        scenario: what the node has.
        majors: the dynamic ones.

    Returns:
        All nodes; links are left to :func:`make_devices`.
    """
    found = [
        Node("nvidiactl", NVIDIA_MAJOR, CONTROL_MINOR),
        Node("nvidia-modeset", NVIDIA_MAJOR, MODESET_MINOR),
        Node("nvidia-uvm", majors.uvm, 0),
        Node("nvidia-uvm-tools", majors.uvm, 1),
    ]
    video = group_of("video", 44)  # 44 is Debian's
    for gpu in scenario.gpus:
        found.append(Node(f"nvidia{gpu.minor}", NVIDIA_MAJOR, gpu.minor))
        if scenario.drm:
            for name, minor in ((f"card{gpu.index}", 0), (f"renderD{128 + gpu.index}", 128)):
                found.append(Node(f"dri/{name}", DRM_MAJOR, minor + gpu.index, 0o660, video))
    # The module makes the nodes of those instances only that there are; who may configure is
    # root's alone, an instance everybody's who was given its node.
    if any(gpu.model.profiles for gpu in scenario.gpus):
        found += [_capability(majors, minor, 0o400) for minor in (CONFIG_MINOR, MONITOR_MINOR)]
    for gpu in scenario.gpus:
        for instance in gpu.mig or ():
            found.append(_capability(majors, access_minor(gpu.minor, instance.id), 0o444))
            found += [
                _capability(majors, access_minor(gpu.minor, instance.id, compute.id), 0o444)
                for compute in instance.compute
            ]
    found += [
        Node(f"nvidia-caps-imex-channels/channel{channel}", majors.imex, channel)
        for channel in scenario.imex_channels
    ]
    return found


def make_devices(dev: str, scenario: Scenario, majors: Majors) -> None:
    """Make the device nodes of a scenario.

    Args:
        dev: an empty directory.
        scenario: what the node has.
        majors: the dynamic ones.

    Raises:
        DevicesForbidden: nodes cannot be made there, or not be opened.
    """
    make_nodes(dev, nodes(scenario, majors))
    if scenario.drm and scenario.gpus:
        by_path = os.path.join(dev, "dri/by-path")
        os.mkdir(by_path)
        for gpu in scenario.gpus:
            os.symlink(f"../card{gpu.index}", os.path.join(by_path, f"pci-{gpu.pci}-card"))
            os.symlink(
                f"../renderD{128 + gpu.index}", os.path.join(by_path, f"pci-{gpu.pci}-render")
            )


def make_nodes(dev: str, nodes: Iterable[Node]) -> None:
    """Make device nodes.

    Args:
        dev: the directory that they are below.
        nodes: which.

    Raises:
        DevicesForbidden: nodes cannot be made there, or not be opened.
    """
    _check(dev)
    for node in nodes:
        path = os.path.join(dev, node.path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.mknod(path, stat.S_IFCHR | node.mode, os.makedev(node.major, node.minor))
        os.chown(path, 0, node.gid)
        os.chmod(path, node.mode)  # past the umask


def _check(dev: str) -> None:
    """Try with a node that everybody may open: /dev/null's."""
    probe = os.path.join(dev, ".null")
    try:
        os.mknod(probe, stat.S_IFCHR | 0o666, _NULL)
        os.close(os.open(probe, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        nodev = error.errno == errno.EACCES
        raise DevicesForbidden(
            f"make device nodes in {dev}",
            found="its file system is mounted nodev" if nodev else str(error),
            do="choose a directory on a file system with device nodes" if nodev else "be root",
        ) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(probe)


def _capability(majors: Majors, minor: int, mode: int) -> Node:
    return Node(f"nvidia-caps/nvidia-cap{minor}", majors.caps, minor, mode)


def group_of(name: str, otherwise: int) -> int:
    """The number of a group.

    Args:
        name: its name on this machine.
        otherwise: its number where the machine has no such group.
    """
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return otherwise
