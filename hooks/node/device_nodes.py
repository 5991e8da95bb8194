"""Compare device nodes of the host with the numbers that the kernel lists for their drivers.

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
    """Return the capability node with a minor number, in the container."""
    return f"/dev/nvidia-caps/nvidia-cap{minor}"


@dataclass(frozen=True, slots=True)
class MadeNodes:
    """What was done to create missing device nodes, and to replace stale ones."""

    made: tuple[str, ...] = ()  # paths of those that were made, on the host
    failed: tuple[tuple[str, str], ...] = ()  # what stood in the way, by the path
    # paths of devices that did not exist when the inventory's nodes were read, but do now: another
    # shim was faster, or this one has created them for an earlier attempt
    found: tuple[str, ...] = ()


def host_path(config: Config, path: str) -> str:
    """Return where a node of the container's /dev is on the host."""
    return config.dev + path.removeprefix("/dev")


def look_at_node(
    config: Config, path: str, majors: Collection[int], minor: int | None, driver: str
) -> Node | str:
    """Return the device node at a path, or what is wrong with it, in words.

    Args:
        path: the path in the container ("/dev/nvidia0").
        majors: the major numbers of its driver; none if the driver is not loaded.
        minor: its minor number; None for any.
    """
    host = host_path(config, path)
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


def is_device(host: str) -> bool:
    """Whether there is a character device at a path of the host, and not behind a link."""
    try:
        return stat.S_ISCHR(os.lstat(host).st_mode)
    except OSError:
        return False


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


def cap_minors(config: Config) -> dict[str, int]:
    """Return the minors of the capability nodes, by name ("gpu0/gi1/ci0/access", "config").

    The file lists all that could exist, thousands of lines, and never changes while the module is
    loaded. So it is read but not observed.
    """
    minors = {}
    for line in (read_text(f"{config.proc}/driver/nvidia-caps/mig-minors") or "").splitlines():
        name, _, minor = line.strip().rpartition(" ")
        if minor.isdecimal():
            minors[name] = int(minor)
    return minors
