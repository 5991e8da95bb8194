"""What the engine decides to add to a container, as values.

A plan is made by :mod:`hooks.planning` from a grant, the node's inventory and the image's
layout; :mod:`hooks.mutation` writes it into the OCI spec and verifies the result;
:mod:`hooks.placement` writes its files into the rootfs. Nothing in here touches the system.

Paths: ``source`` is a path on the host; every other path is absolute inside the container.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Arch(Enum):
    """An architecture that driver libraries come in, by its ELF name."""

    X86_64 = "x86_64"
    I386 = "i386"
    AARCH64 = "aarch64"
    ARM = "arm"


@dataclass(frozen=True, slots=True)
class Device:
    """A character device the container may open.

    Attributes:
        path: the node inside the container ("/dev/nvidia0").
        major: device major number.
        minor: device minor number.
        mode: permission bits of the node.
        uid: owner of the node.
        gid: group of the node.
        access: cgroup access, a subset of "rwm".
        reason: why it is there, for people ("GPU 0", "control device").
    """

    path: str
    major: int
    minor: int
    mode: int = 0o666
    uid: int = 0
    gid: int = 0
    access: str = "rwm"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Mount:
    """A bind mount of one host file or directory.

    Attributes:
        source: the file on the host, below the driver root or our staging directory.
        destination: where the container sees it.
        options: mount options as the OCI spec writes them.
        reason: why it is there, for people.
    """

    source: str
    destination: str
    options: tuple[str, ...] = ("ro", "nosuid", "nodev", "rbind", "rprivate")
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link in the rootfs: ``path`` → ``target``.

    ``target`` is a bare file name (a link beside its library) or an absolute path inside the
    container. Neither has an empty or ``..`` component.
    """

    path: str
    target: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CachedLibrary:
    """One line of ld.so.cache: ``soname`` is found at ``path`` for programs of ``arch``."""

    soname: str
    path: str
    arch: Arch


@dataclass(frozen=True, slots=True)
class Missing:
    """A file the plan would have had: what, where it was sought. Told by ``explain``."""

    what: str
    sought: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is added to one container.

    Attributes:
        devices: character devices, each also allowed in the device cgroup.
        mounts: bind mounts, in order.
        environment: variables set for every process of the container (init and exec).
        additional_gids: supplementary groups for every process of the container.
        links: symbolic links written into the rootfs.
        libraries: entries for the rootfs's ld.so.cache.
        library_directories: directories that a later ``ldconfig`` in the container has to
            search (the conf drop-in); musl's path file takes them too.
        missing: what was wanted and is not on this node.
    """

    devices: tuple[Device, ...] = ()
    mounts: tuple[Mount, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    additional_gids: tuple[int, ...] = ()
    links: tuple[Link, ...] = ()
    libraries: tuple[CachedLibrary, ...] = ()
    library_directories: tuple[str, ...] = ()
    missing: tuple[Missing, ...] = field(default=())
