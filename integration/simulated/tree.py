"""Collect the small files, links and device nodes of a simulated node, and write them.

Drivers add to a :class:`NodeTree` what they create on a real node: GPUs on the PCI bus, DRM nodes,
majors in ``/proc/devices``. As in the kernel's own sysfs, device directories are below
``sys/devices``, and everything else is relative links to them: ``bus/pci/devices``,
``bus/pci/drivers``, ``class/drm`` and ``dev/char``.

``mknod`` as root works without a driver; opening such a node fails with ENXIO. Type, numbers, mode
and owner of the nodes are as on a real node. On a machine with a driver the nodes would reach its
GPUs.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from integration.simulated.errors import DevicesForbidden

DRM_MAJOR: Final = 226
MISC_MAJOR: Final = 10
FIRST_RENDER: Final = 128

# The majors that the kernel assigns dynamically: downwards, first the low range.
# Source: include/linux/fs.h, CHRDEV_MAJOR_DYN_*.
_DYNAMIC: Final = (*range(254, 233, -1), *range(511, 383, -1))

_NULL: Final = os.makedev(1, 3)


@dataclass(frozen=True, slots=True)
class Device:
    """A character device: its path below ``dev``, numbers, permission bits and group."""

    path: str
    major: int
    minor: int
    mode: int = 0o666
    gid: int = 0


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A GPU on the PCI bus, as in sysfs."""

    address: str  # "0000:18:00.0"
    driver: str  # the kernel driver
    vendor: int  # PCI vendor id, also of the subsystem
    device: int  # PCI device id
    pci_class: int  # PCI class code
    subsystem: int | None = None  # PCI subsystem id; None if not simulated
    more: dict[str, str] = field(default_factory=dict)  # the contents of other attributes

    @property
    def directory(self) -> str:
        """Its directory below ``sys``."""
        return f"devices/pci{self.address[:7]}/{self.address}"

    def attributes(self) -> dict[str, str]:
        """Return the contents of its files, without a final newline."""
        own = {
            "vendor": f"0x{self.vendor:04x}",
            "device": f"0x{self.device:04x}",
            "class": f"0x{self.pci_class:06x}",
        }
        uevent = [
            f"DRIVER={self.driver}",
            f"PCI_CLASS={self.pci_class:X}",
            f"PCI_ID={self.vendor:04X}:{self.device:04X}",
        ]
        if self.subsystem is not None:
            own["subsystem_vendor"] = f"0x{self.vendor:04x}"
            own["subsystem_device"] = f"0x{self.subsystem:04x}"
            uevent.append(f"PCI_SUBSYS_ID={self.vendor:04X}:{self.subsystem:04X}")
        uevent.append(f"PCI_SLOT_NAME={self.address}")
        return {**own, "uevent": "\n".join(uevent), **self.more}


class NodeTree:
    """What will be written below a node's directory.

    Attributes:
        directories: directories that may stay empty.
        files: contents by path.
        links: targets by path; both are relative to the node's directory.
        devices: device nodes.
    """

    def __init__(self, proc_devices: str) -> None:
        self.directories: set[str] = set()
        self.files: dict[str, str] = {}
        self.links: dict[str, str] = {}
        self.devices: list[Device] = []
        self._proc_devices = proc_devices
        self._majors: list[tuple[int, str]] = []
        self._free = free_majors(proc_devices)

    def free_major(self) -> int:
        """Return the major that the kernel would assign next."""
        return next(self._free)

    def add_major(self, name: str, major: int | None = None) -> int:
        """Add a driver to /proc/devices, by default with a free major; return the major."""
        chosen = self.free_major() if major is None else major
        self._majors.append((chosen, name))
        return chosen

    def add_pci(self, device: PciDevice) -> None:
        """Add a device to the PCI bus, bound to its driver."""
        driver = f"sys/bus/pci/drivers/{device.driver}"
        place = f"sys/{device.directory}"
        self.files |= {f"{place}/{name}": f"{text}\n" for name, text in device.attributes().items()}
        self.links[f"{place}/driver"] = driver
        self.links[f"sys/bus/pci/devices/{device.address}"] = place
        self.links[f"{driver}/{device.address}"] = place

    def add_drm(self, owner: str, number: int, groups: tuple[int, int], address: str = "") -> None:
        """Add the card node and the render node of a device.

        Args:
            owner: the device's directory below ``sys``.
            number: the card node's number.
            groups: the groups of the card node and of the render node.
            address: the PCI address for the links in ``dri/by-path``; "" for a part of a GPU.
        """
        minors = (("card", "card", number), ("render", "renderD", FIRST_RENDER + number))
        for (kind, prefix, minor), gid in zip(minors, groups, strict=True):
            name = f"{prefix}{minor}"
            place = f"sys/{owner}/drm/{name}"
            self.devices.append(Device(f"dri/{name}", DRM_MAJOR, minor, 0o660, gid))
            self.files[f"{place}/dev"] = f"{DRM_MAJOR}:{minor}\n"
            self.files[f"{place}/uevent"] = (
                f"MAJOR={DRM_MAJOR}\nMINOR={minor}\nDEVNAME=dri/{name}\nDEVTYPE=drm_minor\n"
            )
            self.links[f"{place}/device"] = f"sys/{owner}"
            self.links[f"sys/class/drm/{name}"] = place
            self.links[f"sys/dev/char/{DRM_MAJOR}:{minor}"] = place
            if address:
                self.links[f"dev/dri/by-path/pci-{address}-{kind}"] = f"dev/dri/{name}"

    def proc_devices(self) -> str:
        """Return the machine's list of majors with the node's drivers added, sorted."""
        character, _, block = self._proc_devices.partition("\n\n")
        title, *lines = character.splitlines()
        wanted = [f"{major:3} {name}" for major, name in self._majors]
        lines = sorted(dict.fromkeys((*lines, *wanted)), key=lambda line: int(line.split()[0]))
        return "\n".join([title, *lines]) + f"\n\n{block}"

    def write(self, directory: str) -> None:
        """Write everything; all users may read the files.

        Raises:
            DevicesForbidden: device nodes cannot be created or opened there.
        """
        if self.devices:
            _make_devices(os.path.join(directory, "dev"), self.devices)
        for path in self.directories:
            os.makedirs(os.path.join(directory, path), exist_ok=True)
        files = {**self.files, "proc/devices": self.proc_devices()}
        for path, text in files.items():
            with open(_place(directory, path), "w", encoding="ascii") as file:
                file.write(text)
                os.fchmod(file.fileno(), 0o444)
        for path, target in self.links.items():
            os.symlink(os.path.relpath(target, os.path.dirname(path)), _place(directory, path))


def free_majors(proc_devices: str) -> Iterator[int]:
    """Yield unused majors, in the order in which the kernel assigns them."""
    taken = {int(number) for number in re.findall(r"^ *(\d+) ", proc_devices, re.MULTILINE)}
    return (major for major in _DYNAMIC if major not in taken)


def group_of(name: str, otherwise: int) -> int:
    """Return the number of a group.

    Args:
        otherwise: the number if the machine has no such group.
    """
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return otherwise


def video_group() -> int:
    """Return the group of most GPU device nodes."""
    return group_of("video", 44)  # 44 in Debian


def _place(directory: str, path: str) -> str:
    full = os.path.join(directory, path)
    os.makedirs(os.path.dirname(full), exist_ok=True)
    return full


def _make_devices(dev: str, devices: Iterable[Device]) -> None:
    _check(dev)
    for device in devices:
        path = _place(dev, device.path)
        os.mknod(path, stat.S_IFCHR | device.mode, os.makedev(device.major, device.minor))
        os.chown(path, 0, device.gid)
        os.chmod(path, device.mode)  # mknod applied the umask


def _check(dev: str) -> None:
    """Check with a node that every user may open: a copy of /dev/null."""
    probe = os.path.join(dev, ".null")
    try:
        os.mknod(probe, stat.S_IFCHR | 0o666, _NULL)
        os.close(os.open(probe, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        nodev = error.errno == errno.EACCES
        raise DevicesForbidden(
            f"to create device nodes in {dev}",
            found="its file system is mounted nodev" if nodev else str(error),
            do="choose a directory on a file system with device nodes" if nodev else "run as root",
        ) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(probe)
