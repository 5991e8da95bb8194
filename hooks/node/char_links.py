"""The links /dev/char/MAJOR:MINOR, without which systemd forgets a container's GPUs.

When systemd makes a container's cgroup, the low-level runtime tells it the devices by such
names. Up to version 252 or so, one that does not exist on the host is left out: the container
works, because the runtime allows the device itself as well, until the next ``systemctl
daemon-reload``, when systemd writes the cgroup's rules anew from what it was told, and the GPU
answers EPERM from then on. udev makes these links for devices that the kernel announces;
NVIDIA's nodes are made by mknod, and nobody makes theirs. So they are made here, before the
container is.

Rules
- Only for nodes that a container is given, and only where the node is what it should be.
- A link is right if it leads to a character device of the numbers in its name. A right one is
  left alone, whoever made it. A wrong or dangling one (of a driver that has had other numbers)
  is replaced. What is no link is left alone.
- It says what udev would say: ``../nvidia0``; or the whole path of a node that is in a driver
  container's own /dev alone. Each is made or replaced in one step, so that any
  number of shims may do it at once.
- They stay when the container goes, as udev's do: they name a device of the host, and another
  container may need them.
- Where they cannot be made the container starts all the same, and its record says so: without
  systemd's cgroups nothing needs them.

Source: systemd.resource-control(5), DeviceAllow=; runc libcontainer/cgroups/devices; the
advice of NVIDIA's toolkit, ``nvidia-ctk system create-dev-char-symlinks``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, Final

from api.values import value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hooks.edits.plan import Device

__all__ = ["CharLinks", "is_linked", "link_nodes"]

_DIRECTORY: Final = "char"


@value
class CharLinks:
    """What came of making links.

    Attributes:
        made: the names of those that were made or replaced ("195:0").
        failed: what stood in the way, for people, by the names of those that are not right.
    """

    made: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()


def link_nodes(
    dev: str, devices: Iterable[Device], hosts: Mapping[str, str] | None = None
) -> CharLinks:
    """Makes sure that each device's node has its link.

    Args:
        dev: the directory of the device nodes, the host's.
        devices: what a container is given.
        hosts: where the nodes are on the host that are not below ``dev``, by path in the
            container.

    Returns:
        What was done. A failure is no error.
    """
    made: list[str] = []
    failed: list[tuple[str, str]] = []
    for device in devices:
        name = f"{device.major}:{device.minor}"
        try:
            if _link(dev, device, name, (hosts or {}).get(device.path, "")):
                made.append(name)
        except OSError as error:
            failed.append((name, f"{error.filename or dev}: {error.strerror}"))
    return CharLinks(tuple(made), tuple(failed))


def is_linked(dev: str, device: Device) -> bool:
    """Whether a device has a link that is right.

    Args:
        dev: the directory of the device nodes, the host's.
        device: which.
    """
    link = os.path.join(dev, _DIRECTORY, f"{device.major}:{device.minor}")
    return _is_device(link, os.makedev(device.major, device.minor))


def _link(dev: str, device: Device, name: str, host: str) -> bool:
    """Makes the link of one node, if it has none that is right; whether it did."""
    node = device.path.removeprefix("/dev/")
    number = os.makedev(device.major, device.minor)
    directory = os.path.join(dev, _DIRECTORY)
    link = os.path.join(directory, name)
    if _is_device(link, number):
        return False
    below = os.path.join(dev, node)
    place = host or below
    if not _is_device(place, number, follow=False):
        raise OSError(errno.ENODEV, f"is not device {name} any more", place)
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o755)
    target = os.path.join("..", node) if place == below else place
    try:
        os.symlink(target, link)
    except FileExistsError:
        return _replace(link, target, number)
    return True


def _replace(link: str, target: str, number: int) -> bool:
    """Puts a link in the place of one that is wrong; whether it did."""
    if _is_device(link, number):
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


def _is_device(path: str, number: int, *, follow: bool = True) -> bool:
    try:
        seen = os.stat(path, follow_symlinks=follow)
    except OSError:
        return False
    return stat.S_ISCHR(seen.st_mode) and seen.st_rdev == number
