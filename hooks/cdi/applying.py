"""Turn a device's edits into a plan, like NVIDIA's own.

Rules
- The common edits of a file come once, before the first of its devices. Then come those of each
  device, in the order in which the container names the devices. If two edits concern the same
  place, the later one applies.
- A device node without type or numbers takes them from the host. Without owner or group, it takes
  those of the container's user. Its group is not added to the process: that is the purpose of
  ``additionalGids``.
- The source of a mount must exist, and so must a node that is looked up on the host.
- It is an error if the image has no mount point and is not writable.
- Nothing is mounted over /, or below /proc and /sys. Only bind mounts and file systems in memory
  (tmpfs, hugetlbfs) are allowed.
- A network interface is moved only by a runtime that supports it. Other runtimes would ignore the
  edit, and the container would silently lack the interface.
- :mod:`hooks.cdi.nvidia_hooks` does the work of NVIDIA's hooks in process. Another hook runs if the
  operator allows its program; otherwise the container is refused, or starts without it, as
  configured. A hook gets the environment in the spec, or only a PATH, so that it never inherits the
  image's (CVE-2025-23266).
- Mounts are sorted by depth, so that none hides another.

Unlike in the reference library, the container's own mount or device at the same place stays, and a
device with other numbers is an error (:func:`hooks.edits.mutation.apply`).

Source: CDI specification, "OCI Edits", "Error Handling"; where it is silent, the reference
library's container-edits.go.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Iterator
from functools import cache
from typing import Final

from hooks.cdi import nvidia_hooks
from hooks.cdi.errors import (
    CdiEditRefused,
    CdiHookRefused,
    CdiResourceMissing,
    CdiUnsupported,
    RuntimeUnasked,
)
from hooks.cdi.nvidia_hooks import FindCompat
from hooks.cdi.registry import Loaded, Resolution
from hooks.cdi.spec import NO_PERMISSIONS, DeviceNode, Edits, SpecHook, SpecMount
from hooks.config import Config
from hooks.edits.compat import with_compat
from hooks.plan import Bounds, Contribution, Device, Hook, IntelRdt, Mount, NetDevice, Plan
from hooks.requests.oci_hooks import Call
from hooks.words import KERNELS, is_below, normal_path

MOUNT_KINDS: Final = frozenset({"bind", "tmpfs", "hugetlbfs"})

_BIND_OPTIONS: Final = frozenset({"bind", "rbind"})
_BIND_KINDS: Final = frozenset({"", "none", "bind", "rbind"})
_DEFAULT_MODE: Final = 0o666
_PERMISSIONS: Final = 0o777
_DEFAULT_ACCESS: Final = "rwm"
_KINDS_OF_NODES: Final = {stat.S_IFCHR: "c", stat.S_IFBLK: "b", stat.S_IFIFO: "p"}
_FIFO: Final = "p"
_PATH: Final = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NET_DEVICES_SINCE: Final = (1, 3, 0)
"""linux.netDevices came with version 1.3.0 of the OCI runtime specification."""


def contribute(
    resolution: Resolution,
    *,
    config: Config,
    user: tuple[int, int] = (0, 0),
    oci_version: Callable[[], str] = str,
    find_compat: FindCompat | None = None,
) -> Contribution:
    """Return the edits of the devices that a container names, with bounds for checking them.

    Args:
        oci_version: returns the latest version of the OCI runtime specification that the low-level
            runtime supports; "" if unknown. Few specs need it.
        find_compat: decides whether the image's own libcuda comes first; None if the image cannot
            be read.

    Raises:
        CdiResourceMissing: a device node or the source of a mount does not exist.
        CdiEditRefused: an edit is not allowed for any container.
        CdiHookRefused: a hook is not allowed.
        CdiHookMalformed: a hook of NVIDIA's has unknown arguments.
        CdiUnsupported: the low-level runtime cannot move network interfaces.
        RuntimeUnasked: ``oci_version`` returns no version, so it is unknown whether it can.
    """
    work = _Work(config, user, oci_version, find_compat)
    for edits, owner in _in_order(resolution):
        work.add(edits, owner)
    return work.contribution(tuple(f"{f.name} of {f.file.path}" for f in resolution.devices))


def _in_order(resolution: Resolution) -> Iterator[tuple[Edits, str]]:
    """Yield all edits in order, each with its owner."""
    seen: set[str] = set()
    for found in resolution.devices:
        if found.file.path not in seen:
            seen.add(found.file.path)
            yield found.file.spec.edits, _of_file(found.file)
        yield found.device.edits, str(found.name)


def _of_file(file: Loaded) -> str:
    return f"{file.spec.kind} of {file.path}"


class _Work:
    """A plan under construction."""

    def __init__(
        self,
        config: Config,
        user: tuple[int, int],
        oci_version: Callable[[], str],
        find_compat: FindCompat | None,
    ) -> None:
        self._config = config
        self._find_compat = find_compat
        self._user = user
        self._oci_version = cache(oci_version)
        self._environment: dict[str, str] = {}
        self._devices: dict[str, Device] = {}
        self._mounts: dict[str, Mount] = {}
        self._gids: dict[int, None] = {}
        self._hooks: list[Hook] = []
        self._nvidia: list[Call] = []
        self._intel_rdt: IntelRdt | None = None
        self._net_devices: dict[str, NetDevice] = {}
        self._notes: list[str] = []

    def add(self, edits: Edits, owner: str) -> None:
        """Add the edits of one device, or those that are common to a file."""
        for entry in edits.env:
            name, _, value = entry.partition("=")
            self._environment[name] = value
        for node in edits.device_nodes:
            device = self._device(node, owner)
            self._devices[device.path] = device
        for each in edits.net_devices:
            self._check_net_device(each, owner)
            self._net_devices[each.host_name] = each
        for wanted in edits.mounts:
            mount = _mount(wanted, owner)
            self._mounts.pop(mount.destination, None)
            self._mounts[mount.destination] = mount
        for hook in edits.hooks:
            self._add_hook(hook, owner)
        if edits.intel_rdt is not None:
            self._intel_rdt = edits.intel_rdt
        self._gids |= dict.fromkeys(gid for gid in edits.additional_gids if gid != 0)

    def contribution(self, granted: tuple[str, ...]) -> Contribution:
        """Return the complete plan."""
        devices = tuple(self._devices.values())
        mounts = sorted(self._mounts.values(), key=lambda mount: mount.destination.count("/"))
        plan = Plan(
            devices=devices,
            mounts=tuple(mounts),
            environment=tuple(self._environment.items()),
            additional_gids=tuple(self._gids),
            hooks=tuple(dict.fromkeys(self._hooks)),
            intel_rdt=(self._intel_rdt,) if self._intel_rdt is not None else (),
            net_devices=tuple(self._net_devices.values()),
        )
        done, notes = nvidia_hooks.perform(self._nvidia, plan, self._config)
        calls = (f"{call.name} of {call.owner} was done in process" for call in self._nvidia)
        notes = (*dict.fromkeys(calls), *notes)
        if self._find_compat is not None:
            compat = nvidia_hooks.decide_compat(self._nvidia, done, self._config, self._find_compat)
            done = with_compat(done, compat)
            notes = (*notes, compat.why) if compat.why else notes
        bounds = Bounds(
            majors=frozenset(device.major for device in devices if device.kind == "c"),
            source_roots=tuple(mount.source for mount in mounts if mount.kind == "bind"),
            block_majors=frozenset(device.major for device in devices if device.kind == "b"),
            mount_kinds=MOUNT_KINDS,
            hook_programs=frozenset(self._config.cdi_allow_hooks),
            host_settings=True,
        )
        return Contribution(done, bounds, "CDI", granted, (*self._notes, *notes))

    def _device(self, node: DeviceNode, owner: str) -> Device:
        path = _clean(node.path, owner)
        kind, major, minor = self._numbers(node, owner)
        user, group = self._user
        access = node.permissions or _DEFAULT_ACCESS
        return Device(
            path=path,
            major=major,
            minor=minor,
            mode=_DEFAULT_MODE if node.mode is None else node.mode & _PERMISSIONS,
            uid=user if node.uid is None else node.uid,
            gid=group if node.gid is None else node.gid,
            access="" if access == NO_PERMISSIONS else "".join(c for c in "rwm" if c in access),
            reason=owner,
            kind=kind,
            host="" if kind == _FIFO else self._on_host(node.host_path or node.path),
        )

    def _numbers(self, node: DeviceNode, owner: str) -> tuple[str, int, int]:
        # "u" is POSIX's unbuffered character device, which Linux treats like "c".
        kind = "c" if node.kind == "u" else node.kind
        if kind and (node.major or kind == _FIFO):
            return kind, node.major, node.minor
        host_path = node.host_path or node.path
        asked = f"the device node {host_path} for {owner}"
        try:
            seen = os.lstat(self._on_host(host_path))
        except OSError as error:
            raise CdiResourceMissing(
                asked, found=str(error.strerror), do="see that its driver is loaded"
            ) from error
        there = _KINDS_OF_NODES.get(stat.S_IFMT(seen.st_mode))
        if there is None or (kind and kind != there):
            raise CdiResourceMissing(
                asked,
                found=f"it is of type {there}, not {kind}" if there else "it is not a device node",
                do="write the CDI spec again with the vendor's program",
            )
        if node.major:
            return there, node.major, node.minor
        return there, os.major(seen.st_rdev), os.minor(seen.st_rdev)

    def _on_host(self, path: str) -> str:
        """Return the path, as we see it, of a node in the host's /dev."""
        below = posixpath.normpath(path).removeprefix("/dev/")
        return f"{self._config.dev}/{below}" if below[:1] != "/" else path

    def _add_hook(self, hook: SpecHook, owner: str) -> None:
        call = nvidia_hooks.call_of(hook, owner)
        if call is not None:
            self._nvidia.append(call)
            return
        told = f"the {hook.name} hook {hook.path} of {owner}"
        if posixpath.normpath(hook.path) not in self._config.cdi_allow_hooks:
            if self._config.cdi_skip_hooks:
                self._notes.append(f"{told} was left out: [cdi] allow-hooks does not have it")
                return
            raise CdiHookRefused(
                told,
                found="[cdi] allow-hooks does not have it",
                do='add it there, or do without such hooks: other-hooks = "leave-out"',
            )
        self._hooks.append(
            Hook(
                kind=hook.name,
                path=posixpath.normpath(hook.path),
                args=hook.args or (hook.path,),
                environment=hook.env or (_PATH,),
                timeout=hook.timeout,
                reason=owner,
            )
        )

    def _check_net_device(self, device: NetDevice, owner: str) -> None:
        asked = f"to move the network interface {device.host_name} for {owner}"
        version = self._oci_version()
        if not version:
            raise RuntimeUnasked(asked, found="the low-level runtime was not asked whether it can")
        if _version(version) < _NET_DEVICES_SINCE:
            raise CdiUnsupported(
                asked,
                found=f"the low-level runtime knows version {version} of the OCI specification",
                do="use runc 1.4 or crun 1.28, or newer",
            )


def _version(text: str) -> tuple[int, ...]:
    """Return a version's numbers; an unknown version counts as the lowest."""
    numbers = text.partition("-")[0].partition("+")[0].split(".")
    return tuple(int(n) for n in numbers) if all(n.isdecimal() for n in numbers) else ()


def _mount(wanted: SpecMount, owner: str) -> Mount:
    destination = _clean(wanted.container_path, owner)
    is_bind = wanted.kind in _BIND_KINDS or not _BIND_OPTIONS.isdisjoint(wanted.options)
    kind = "bind" if is_bind else wanted.kind
    asked = f"a mount at {destination} for {owner}"
    if kind not in MOUNT_KINDS:
        raise CdiEditRefused(
            asked, found=f"its type is {kind}", do=f"use one of {', '.join(sorted(MOUNT_KINDS))}"
        )
    options = wanted.options
    source = wanted.host_path
    if is_bind:
        if _BIND_OPTIONS.isdisjoint(options):
            options = ("rbind", *options)
        if not source.startswith("/"):
            raise CdiEditRefused(asked, found=f"its source {source!r} is no absolute path")
        source = normal_path(source)
        try:
            os.stat(source)
        except OSError as error:
            raise CdiResourceMissing(
                f"{source} of the host, to be mounted for {owner}",
                found=str(error.strerror),
                do="write the CDI spec again with the vendor's program",
            ) from error
    return Mount(source, destination, options, owner, kind, required=True)


def _clean(path: str, owner: str) -> str:
    """Normalise a path in the container; refuse / and paths below /proc and /sys."""
    clean = normal_path(path)
    if clean == "/" or is_below(clean, KERNELS):
        raise CdiEditRefused(
            f"an edit at {path} for {owner}",
            found="nothing of a CDI spec goes over / or below /proc and /sys",
            do="have the vendor's program write the CDI spec without it",
        )
    return clean
