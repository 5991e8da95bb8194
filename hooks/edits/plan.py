"""What the engine decides to add to a container, as values.

A plan is made by :mod:`hooks.edits.planning` from a grant, the node's inventory and the image's
layout; :mod:`hooks.edits.mutation` writes it into the OCI spec; :mod:`hooks.edits.verification`
checks the result; :mod:`hooks.image.placement` writes its files into the rootfs. Nothing in here
touches the system.

Paths: ``source`` is a path on the host; every other path is absolute inside the container.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from api.values import value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hooks.node.gpus import Node


NVIDIA = "NVIDIA"
"""The vendor whose devices have a grant of their own in the record."""


class Arch(Enum):
    """An architecture that driver libraries come in, by its ELF name."""

    X86_64 = "x86_64"
    I386 = "i386"
    AARCH64 = "aarch64"
    ARM = "arm"


@value
class Device:
    """A device the container may open.

    Attributes:
        path: the node inside the container ("/dev/nvidia0").
        major: device major number.
        minor: device minor number.
        mode: permission bits of the node.
        uid: owner of the node.
        gid: group of the node.
        access: cgroup access, a subset of "rwm".
        reason: why it is there, for people ("GPU 0", "control device").
        kind: "c" for a character device, "b" for a block device, "p" for a FIFO; only a
            foreign CDI spec brings others than "c".
        host: where its node is on the host; "" where nobody needs to know. In a user namespace
            it is mounted from there, as nobody can make a node.
    """

    path: str
    major: int
    minor: int
    mode: int = 0o666
    uid: int = 0
    gid: int = 0
    access: str = "rwm"
    reason: str = ""
    kind: str = "c"
    host: str = ""
    _apart = ("host",)


@value
class Mount:
    """A mount, nearly always a bind mount of one host file or directory.

    Attributes:
        source: the file on the host, below the driver root or our staging directory.
        destination: where the container sees it.
        options: mount options as the OCI spec writes them.
        reason: why it is there, for people.
        kind: the mount's type; only a foreign CDI spec brings others than "bind".
        required: whether a container that has no room for it is not to be made. What it does
            without a foreign CDI spec's mount nobody knows; the driver's own are known.
    """

    source: str
    destination: str
    options: tuple[str, ...] = ("ro", "nosuid", "nodev", "rbind", "rprivate")
    reason: str = ""
    kind: str = "bind"
    required: bool = False


@value
class Link:
    """A symbolic link in the rootfs: ``path`` → ``target``.

    ``target`` is a bare file name (a link beside its library) or an absolute path inside the
    container. Neither has an empty or ``..`` component.
    """

    path: str
    target: str
    reason: str = ""


@value
class File:
    """A small file that is written into the rootfs.

    Attributes:
        path: where.
        content: all of it.
        mode: its permission bits.
        reason: why it is there, for people.
    """

    path: str
    content: bytes
    mode: int = 0o644
    reason: str = ""


@value
class LinkDirectory:
    """A directory of links that is made in staging and mounted read-only.

    For places that are mounted over in every container, such as /dev.

    Attributes:
        path: where the container sees it ("/dev/dri/by-path").
        links: target by name.
        reason: why it is there, for people.
    """

    path: str
    links: tuple[tuple[str, str], ...]
    reason: str = ""


@value
class ProcFile:
    """A file of procfs that is covered by another content, read-only.

    Runtimes refuse mounts below /proc, so it is mounted after ``create`` and before ``start``,
    onto a regular file of the container's procfs and nothing else.

    Attributes:
        path: the file ("/proc/driver/nvidia/params").
        content: what the container reads there.
        reason: why, for people.
    """

    path: str
    content: bytes
    reason: str = ""


@value
class Hook:
    """An OCI hook of a foreign CDI spec that the operator allows.

    Attributes:
        kind: the list it belongs to ("createContainer").
        path: the program on the host.
        args: its arguments, the program's name first.
        environment: all of its environment; never that of the image.
        timeout: seconds; None for no limit.
        reason: why it is there, for people.
    """

    kind: str
    path: str
    args: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    timeout: int | None = None
    reason: str = ""


@value
class IntelRdt:
    """Resource control (cache, memory bandwidth) that a foreign CDI spec puts a container in.

    The attributes are the fields of ``linux.intelRdt`` of the OCI specification; "" and False
    for those that are not set.
    """

    clos_id: str = ""
    l3_cache_schema: str = ""
    mem_bw_schema: str = ""
    schemata: tuple[str, ...] = ()
    enable_monitoring: bool = False
    enable_cmt: bool = False
    enable_mbm: bool = False


@value
class NetDevice:
    """A network interface of the host that a foreign CDI spec moves into the container.

    Attributes:
        host_name: its name on the host.
        name: its name in the container.
    """

    host_name: str
    name: str


@value
class CachedLibrary:
    """One line of ld.so.cache: ``soname`` is found at ``path`` for programs of ``arch``."""

    soname: str
    path: str
    arch: Arch


@value
class Missing:
    """A file the plan would have had: what, where it was sought. Told by ``explain``."""

    what: str
    sought: tuple[str, ...]


@value
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
        first_directories: directories of the image whose libraries come before ours.
        missing: what was wanted and is not on this node.
        files: files written into the rootfs.
        link_directories: directories of links, mounted from staging.
        proc_files: files of procfs to be covered before the container starts.
        hooks: OCI hooks of foreign CDI specs.
        intel_rdt: resource control of foreign CDI specs; the last one holds.
        net_devices: network interfaces of foreign CDI specs.
    """

    devices: tuple[Device, ...] = ()
    mounts: tuple[Mount, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    additional_gids: tuple[int, ...] = ()
    links: tuple[Link, ...] = ()
    libraries: tuple[CachedLibrary, ...] = ()
    library_directories: tuple[str, ...] = ()
    first_directories: tuple[str, ...] = ()
    missing: tuple[Missing, ...] = ()
    files: tuple[File, ...] = ()
    link_directories: tuple[LinkDirectory, ...] = ()
    proc_files: tuple[ProcFile, ...] = ()
    hooks: tuple[Hook, ...] = ()
    intel_rdt: tuple[IntelRdt, ...] = ()
    net_devices: tuple[NetDevice, ...] = ()


@value
class Contribution:
    """A plan of one vendor's, and the bounds that it promises to keep.

    Attributes:
        plan: the edits.
        majors: the major numbers that its devices may have.
        source_roots: the directories of the host that sources of its mounts may be below.
        vendor: whose it is, for people ("NVIDIA", "AMD").
        granted: what it gives, for people.
        notes: what it does not give and why, for people.
        block_majors: the major numbers that its block devices may have.
        mount_kinds: the types that its mounts may have.
        hook_programs: the programs that its hooks may run.
        host_settings: whether it may set resource control, and move interfaces of the host.
    """

    plan: Plan
    majors: frozenset[int]
    source_roots: tuple[str, ...]
    vendor: str = NVIDIA
    granted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    block_majors: frozenset[int] = frozenset()
    mount_kinds: frozenset[str] = frozenset({"bind"})
    hook_programs: frozenset[str] = frozenset()
    host_settings: bool = False


def united(plans: Iterable[Plan]) -> Plan:
    """The plans as one: every list of theirs one after the other, nothing twice.

    Args:
        plans: in the order in which their edits are to be made.

    Returns:
        A plan with all their edits. Directories of links at one path are one directory, since
        a mount of one would hide the other. Of mounts at one place the last holds, and of nodes
        of one device at one place the first; another device there stays, for whoever writes the
        plan into a spec to refuse. Mounts of several plans are in order of depth.
    """
    each = tuple(plans)
    merged = {
        name: tuple(dict.fromkeys(edit for plan in each for edit in getattr(plan, name)))
        for name in Plan.__match_args__
    }
    merged["link_directories"] = _one_per_path(merged["link_directories"])
    if len(each) > 1:
        devices, mounts = merged["devices"], merged["mounts"]
        nodes = {(d.path, d.kind, d.major, d.minor): d for d in reversed(devices)}
        merged["devices"] = tuple(reversed(nodes.values()))
        places = {mount.destination: mount for mount in mounts}
        deep = sorted(places.values(), key=lambda mount: mount.destination.count("/"))
        merged["mounts"] = tuple(deep)
    return Plan(**merged)


def _one_per_path(directories: Iterable[LinkDirectory]) -> tuple[LinkDirectory, ...]:
    found: dict[str, LinkDirectory] = {}
    for one in directories:
        before = found.get(one.path)
        links = one.links if before is None else (*before.links, *one.links)
        reason = one.reason if before is None else before.reason
        found[one.path] = LinkDirectory(one.path, tuple(dict(links).items()), reason)
    return tuple(found.values())


_WORLD_WRITES = 0o006


def device_of(node: Node, reason: str) -> Device:
    """The device that a node of the host is in the container.

    Args:
        node: the node, as it is on the host.
        reason: why it is there, for people.

    Returns:
        A device with the node's path, numbers, owner and permissions.
    """
    return Device(
        path=node.path,
        major=node.major,
        minor=node.minor,
        mode=node.mode,
        uid=node.uid,
        gid=node.gid,
        reason=reason,
        host=node.host,
    )


def groups_of(devices: Iterable[Device]) -> tuple[int, ...]:
    """The groups that one has to be in to open devices.

    Args:
        devices: what a container is given.

    Returns:
        The groups of those that not everybody may open, sorted, never root's.
    """
    shut = (d for d in devices if d.mode & _WORLD_WRITES != _WORLD_WRITES)
    return tuple(sorted({device.gid for device in shut if device.gid != 0}))
