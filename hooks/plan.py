"""What the engine decides to add to a container, as values.

:mod:`hooks.edits.planning` makes a plan from a grant, the node's inventory and the image's layout;
:mod:`hooks.edits.mutation` writes it into the OCI spec; :mod:`hooks.edits.verification` checks the
result; :mod:`hooks.image.placement` writes its files into the rootfs. Nothing in this module
touches the system.

Paths: ``source`` is a path on the host; every other path is absolute inside the container.

The end of this module converts each edit to its JSON form in an OCI spec.

Source: OCI runtime specification, config.md and config-linux.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from api.values import dataclass, field
from hooks.ocispec import Json
from hooks.words import NVIDIA, Arch, Node


@dataclass(frozen=True, slots=True)
class Device:
    """A device the container may open."""

    path: str  # the node inside the container ("/dev/nvidia0")
    major: int
    minor: int
    mode: int = 0o666
    uid: int = 0
    gid: int = 0
    access: str = "rwm"  # cgroup access, a subset of "rwm"
    reason: str = ""  # why it is there, for display ("GPU 0", "control device")
    # "c" for a character device, "b" for a block device, "p" for a FIFO; types other than "c" come
    # only from a foreign CDI spec
    kind: str = "c"
    # where its node is on the host; "" where that does not matter. In a user namespace, runtimes
    # cannot create nodes, so they mount this one.
    host: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount, nearly always a bind mount of one host file or directory."""

    source: str  # the file on the host, below the driver root or our staging directory
    destination: str
    # mount options as the OCI spec writes them
    options: tuple[str, ...] = ("ro", "nosuid", "nodev", "rbind", "rprivate")
    reason: str = ""
    kind: str = "bind"  # the mount's type; only a foreign CDI spec brings others than "bind"
    # whether to refuse a container without room for it, as for mounts of a foreign CDI spec; the
    # driver's own mounts may be left out
    required: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link in the rootfs: ``path`` → ``target``.

    ``target`` is a bare file name (for a link next to its library) or an absolute path inside the
    container. It has no empty or ``..`` component.
    """

    path: str
    target: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class File:
    """A small file to write into the rootfs."""

    path: str
    content: bytes
    mode: int = 0o644
    reason: str = ""
    source: str = ""  # the host file of which this is a changed copy; "" for none


@dataclass(frozen=True, slots=True)
class LinkDirectory:
    """A directory of links, created in staging and mounted read-only.

    For places that every container mounts over, such as /dev.
    """

    path: str  # where the container sees it ("/dev/dri/by-path")
    links: tuple[tuple[str, str], ...]  # target by name
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ProcFile:
    """A procfs file to cover with other content, read-only.

    Runtimes refuse mounts below /proc, so the shim mounts it between ``create`` and ``start``, and
    only onto a regular file of the container's procfs.
    """

    path: str  # the file ("/proc/driver/nvidia/params")
    content: bytes  # what the container reads there
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Hook:
    """An OCI hook of a foreign CDI spec that the operator allows."""

    kind: str  # the list it belongs to ("createContainer")
    path: str
    args: tuple[str, ...] = ()  # its arguments, the program's name first
    environment: tuple[str, ...] = ()  # its whole environment; never the image's
    timeout: int | None = None  # seconds; None for no limit
    reason: str = ""


@dataclass(frozen=True, slots=True)
class IntelRdt:
    """Resource control (cache, memory bandwidth) that a foreign CDI spec sets for a container.

    The attributes are the fields of ``linux.intelRdt`` in the OCI specification; "" or False if
    unset.
    """

    clos_id: str = ""
    l3_cache_schema: str = ""
    mem_bw_schema: str = ""
    schemata: tuple[str, ...] = ()
    enable_monitoring: bool = False
    enable_cmt: bool = False
    enable_mbm: bool = False


@dataclass(frozen=True, slots=True)
class NetDevice:
    """A network interface of the host that a foreign CDI spec moves into the container."""

    host_name: str
    name: str


@dataclass(frozen=True, slots=True)
class CachedLibrary:
    """One line of ld.so.cache: ``soname`` is found at ``path`` for programs of ``arch``."""

    soname: str
    path: str
    arch: Arch


@dataclass(frozen=True, slots=True)
class Missing:
    """A file that the node lacks: its name, and where it was searched. See ``explain``."""

    what: str
    sought: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is added to one container."""

    devices: tuple[Device, ...] = ()  # character devices, each also allowed in the device cgroup
    mounts: tuple[Mount, ...] = ()
    # variables set for every process of the container (init and exec)
    environment: tuple[tuple[str, str], ...] = ()
    additional_gids: tuple[int, ...] = ()  # supplementary groups for every process of the container
    links: tuple[Link, ...] = ()  # symbolic links written into the rootfs
    libraries: tuple[CachedLibrary, ...] = ()  # entries for the rootfs's ld.so.cache
    # directories that a later ``ldconfig`` in the container must search (the conf drop-in); musl's
    # path file lists them too
    library_directories: tuple[str, ...] = ()
    # directories of the image whose libraries come before ours
    first_directories: tuple[str, ...] = ()
    missing: tuple[Missing, ...] = ()  # wanted files that this node lacks
    files: tuple[File, ...] = ()
    link_directories: tuple[LinkDirectory, ...] = ()  # directories of links, mounted from staging
    # procfs files to cover before the container starts
    proc_files: tuple[ProcFile, ...] = ()
    hooks: tuple[Hook, ...] = ()  # OCI hooks of foreign CDI specs
    # resource control of foreign CDI specs; the last one applies
    intel_rdt: tuple[IntelRdt, ...] = ()
    net_devices: tuple[NetDevice, ...] = ()  # network interfaces of foreign CDI specs

    @property
    def small(self) -> tuple[File | LinkDirectory, ...]:
        """The files and link directories."""
        return (*self.files, *self.link_directories)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of the edits, whatever a plan says."""

    majors: frozenset[int] = frozenset()  # the major numbers of character devices
    # the host directories that may contain sources of mounts
    source_roots: tuple[str, ...] = ()
    block_majors: frozenset[int] = frozenset()  # the major numbers of block devices
    mount_kinds: frozenset[str] = frozenset({"bind"})  # the types of mounts
    hook_programs: frozenset[str] = frozenset()  # the programs of hooks
    # whether edits may set resource control, and move network interfaces of the host
    host_settings: bool = False

    def __or__(self, other: Bounds) -> Bounds:
        """Return bounds that allow what either of the two allows."""
        return Bounds(
            self.majors | other.majors,
            (*self.source_roots, *other.source_roots),
            self.block_majors | other.block_majors,
            self.mount_kinds | other.mount_kinds,
            self.hook_programs | other.hook_programs,
            self.host_settings or other.host_settings,
        )


@dataclass(frozen=True, slots=True)
class Contribution:
    """A vendor's plan and its bounds."""

    plan: Plan
    bounds: Bounds
    vendor: str = NVIDIA  # for example "NVIDIA", "AMD"
    granted: tuple[str, ...] = ()  # the devices, for display
    notes: tuple[str, ...] = ()  # what it leaves out and why, for display


def united(plans: Iterable[Plan]) -> Plan:
    """Combine plans into one: concatenate each list, without duplicates.

    Returns:
        A plan with all their edits. Link directories at the same path become one, since a mount of
        one would hide the other. At one place, the last of several mounts counts, and the first of
        several nodes of the same device; a different device there stays, so applying the plan to a
        spec fails. Mounts of several plans are sorted by depth.
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


UNLESS_SET: Final = frozenset(
    {
        "OCL_ICD_VENDORS",
        "TRITON_LIBCUDA_PATH",
        "VK_ADD_DRIVER_FILES",
        "VK_ADD_IMPLICIT_LAYER_PATH",
        "__EGL_EXTERNAL_PLATFORM_CONFIG_DIRS",
        "__EGL_VENDOR_LIBRARY_DIRS",
    }
)
"""Variables of a plan that a process gets only if it does not set them itself."""

_WORLD_WRITES = 0o006


def device_of(node: Node, reason: str) -> Device:
    """Return the container's device for a host node, with the same numbers and permissions."""
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


def shut_devices(devices: Iterable[Device]) -> Iterator[Device]:
    """Return the devices that not everyone may open."""
    return (device for device in devices if device.mode & _WORLD_WRITES != _WORLD_WRITES)


def groups_of(devices: Iterable[Device]) -> tuple[int, ...]:
    """Return the groups that a process needs to open devices: sorted, without root."""
    return tuple(sorted({device.gid for device in shut_devices(devices) if device.gid != 0}))


RULED_KINDS: Final = frozenset("cb")
"""The types of devices that the device cgroup has rules for."""


def device_node(device: Device) -> Json:
    """Return an entry of linux.devices."""
    return {
        "path": device.path,
        "type": device.kind,
        "major": device.major,
        "minor": device.minor,
        "fileMode": device.mode,
        "uid": device.uid,
        "gid": device.gid,
    }


def mounted_node(device: Device) -> Json | None:
    """Return an entry of mounts that stands for a device where a runtime cannot create nodes.

    In a user namespace, a runtime mounts the host's node of the same path instead. It may do so if
    that is the right node.
    """
    if device.host in {"", device.path}:
        return None
    return {
        "destination": device.path,
        "type": "bind",
        "source": device.host,
        "options": ["bind", "rw", "nosuid", "noexec"],
    }


def device_rule(device: Device) -> Json:
    """Return an entry of linux.resources.devices that allows a device."""
    return {
        "allow": True,
        "type": device.kind,
        "major": device.major,
        "minor": device.minor,
        "access": device.access,
    }


def mount_entry(mount: Mount) -> Json:
    """Return an entry of mounts."""
    return {
        "destination": mount.destination,
        "type": mount.kind,
        "source": mount.source,
        "options": list(mount.options),
    }


def hook_entry(hook: Hook) -> Json:
    """Return an entry of a list of hooks."""
    entry: Json = {
        "path": hook.path,
        "args": list(hook.args),
        "env": list(hook.environment),
    }
    return entry if hook.timeout is None else {**entry, "timeout": hook.timeout}


def resource_control(control: IntelRdt) -> Json:
    """linux.intelRdt, without what is not set."""
    fields = {
        "closID": control.clos_id,
        "l3CacheSchema": control.l3_cache_schema,
        "memBwSchema": control.mem_bw_schema,
        "schemata": list(control.schemata),
        "enableMonitoring": control.enable_monitoring,
        "enableCMT": control.enable_cmt,
        "enableMBM": control.enable_mbm,
    }
    return {name: value for name, value in fields.items() if value}


def moved_interfaces(devices: Iterable[NetDevice]) -> Json:
    """linux.netDevices, by the interfaces' names on the host."""
    return {device.host_name: {"name": device.name} for device in devices}
