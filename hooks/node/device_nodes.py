"""Compare the host's device nodes with the kernel's numbers for their drivers.

Source: kernel-open/nvidia/nv-caps.c of NVIDIA's open kernel modules; the MIG user guide, "Device
Nodes and Capabilities".
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from typing import Final

from api.values import dataclass
from hooks.config import Config
from hooks.node.fingerprint import read_text
from hooks.words import Node

CAPS: Final = ("nvidia-caps",)
DRM: Final = ("drm",)
IMEX_DIRECTORY: Final = "/dev/nvidia-caps-imex-channels"
IMEX_DRIVER: Final = "nvidia-caps-imex-channels"


def cap_path(minor: int) -> str:
    """Return the container's path of the capability node with a minor number."""
    return f"/dev/nvidia-caps/nvidia-cap{minor}"


@dataclass(frozen=True, slots=True)
class MadeNodes:
    """The result of creating missing device nodes, and replacing stale ones."""

    made: tuple[str, ...] = ()  # host paths of created nodes
    failed: tuple[tuple[str, str], ...] = ()  # each failed path, and why
    # paths of devices that appeared after the inventory's nodes were read: another shim was faster,
    # or this one has created them in an earlier attempt
    found: tuple[str, ...] = ()


def host_path(config: Config, path: str) -> str:
    """Return the host's path of a node in the container's /dev."""
    return config.dev + path.removeprefix("/dev")


def look_at_node(
    config: Config, path: str, majors: Collection[int], minor: int | None, driver: str
) -> Node | str:
    """Return the device node at a path, or a description of its fault.

    Args:
        path: the path in the container ("/dev/nvidia0").
        majors: the major numbers of its driver; none if the driver is not loaded.
        minor: its minor number; None for any.
    """
    host = host_path(config, path)
    try:
        # Follow no link: it would hide which device is meant, even though /dev is the host's.
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


def is_device(host: str) -> bool:
    """Whether a host path is itself a character device, not a link to one."""
    try:
        return stat.S_ISCHR(os.lstat(host).st_mode)
    except OSError:
        return False


def read_majors(config: Config) -> dict[str, int]:
    """Return the character devices' major numbers in /proc/devices, by driver."""
    majors: dict[str, int] = {}
    for line in (read_text(f"{config.proc}/devices") or "").splitlines():
        if line.startswith("Block devices"):
            break
        number, _, name = line.strip().partition(" ")
        if number.isdecimal():
            majors.setdefault(name.strip(), int(number))
    return majors


def cap_minors(config: Config) -> dict[str, int]:
    """Return the capability nodes' minor numbers by name ("gpu0/gi1/ci0/access", "config").

    The file lists thousands of possible nodes, and never changes while the module is loaded. So it
    is read but not observed.
    """
    minors = {}
    for line in (read_text(f"{config.proc}/driver/nvidia-caps/mig-minors") or "").splitlines():
        name, _, minor = line.strip().rpartition(" ")
        if minor.isdecimal():
            minors[name] = int(minor)
    return minors
