"""Mount a container's rootfs as containerd requests, and unmount it.

Rules
- Options mean the same as for mount(8) and containerd. Options outside of the table of flags are
  passed to the file system. Known options that we do not implement are refused, never ignored.
- A bind mount accepts flags such as ``ro`` only in a second call, which sets all of them: the flags
  of the source are kept unless an option says otherwise.
- Propagation is changed by a separate call, after the mount.
- All mounts succeed, or none: a failure undoes the earlier ones.
- Files as block devices (``loop``) and mapped ids (``uidmap`` with ``gidmap``) need more calls:
  :mod:`shim.rootfs.loop_devices`, :mod:`shim.rootfs.idmapped`.
- mount(2) accepts one page of options. An overlay of many layers exceeds it, so a thread with its
  own working directory names the layers relative to their common directory.
- Unmounting never follows a link, goes from the inside out, and gives a busy file system a moment
  before detaching it. It then leaves the tree, and ends with its last user.

Source: mount(2), umount(2); containerd core/mount/mount_linux.go for the semantics.
"""

from __future__ import annotations

import _thread
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias, TypeVar

from hooks.image.openat2 import open_in_root
from shim import syscalls
from shim.errors import (
    MountFailed,
    MountOptionsTooLong,
    MountOptionUnsupported,
    MountTargetUnusable,
    NvshimError,
    UnmountFailed,
)
from shim.mountinfo import mount_points_below
from shim.rootfs import idmapped, loop_devices

T = TypeVar("T")

# containerd's description of a mount: type, source, target below the rootfs, options.
Mount: TypeAlias = tuple[str, str, str, Sequence[str]]

# Each option sets the first and clears the second.
_FLAGS: Final = {
    "async": (0, syscalls.MS_SYNCHRONOUS),
    "atime": (0, syscalls.MS_NOATIME),
    "bind": (syscalls.MS_BIND, 0),
    "defaults": (0, 0),
    "dev": (0, syscalls.MS_NODEV),
    "diratime": (0, syscalls.MS_NODIRATIME),
    "dirsync": (syscalls.MS_DIRSYNC, 0),
    "exec": (0, syscalls.MS_NOEXEC),
    "mand": (syscalls.MS_MANDLOCK, 0),
    "noatime": (syscalls.MS_NOATIME, 0),
    "nodev": (syscalls.MS_NODEV, 0),
    "nodiratime": (syscalls.MS_NODIRATIME, 0),
    "noexec": (syscalls.MS_NOEXEC, 0),
    "nomand": (0, syscalls.MS_MANDLOCK),
    "norelatime": (0, syscalls.MS_RELATIME),
    "nostrictatime": (0, syscalls.MS_STRICTATIME),
    "nosuid": (syscalls.MS_NOSUID, 0),
    "nosymfollow": (syscalls.MS_NOSYMFOLLOW, 0),
    "rbind": (syscalls.MS_BIND | syscalls.MS_REC, 0),
    "relatime": (syscalls.MS_RELATIME, 0),
    "remount": (syscalls.MS_REMOUNT, 0),
    "ro": (syscalls.MS_RDONLY, 0),
    "rw": (0, syscalls.MS_RDONLY),
    "strictatime": (syscalls.MS_STRICTATIME, 0),
    "suid": (0, syscalls.MS_NOSUID),
    "symfollow": (0, syscalls.MS_NOSYMFOLLOW),
    "sync": (syscalls.MS_SYNCHRONOUS, 0),
}

_PROPAGATION: Final = {
    "private": syscalls.MS_PRIVATE,
    "rprivate": syscalls.MS_PRIVATE | syscalls.MS_REC,
    "shared": syscalls.MS_SHARED,
    "rshared": syscalls.MS_SHARED | syscalls.MS_REC,
    "slave": syscalls.MS_SLAVE,
    "rslave": syscalls.MS_SLAVE | syscalls.MS_REC,
    "unbindable": syscalls.MS_UNBINDABLE,
    "runbindable": syscalls.MS_UNBINDABLE | syscalls.MS_REC,
}

# Options for containerd or mount(8), not for the kernel.
_UNSUPPORTED: Final = ("rro", "X-containerd")

# Options that we implement, besides those of idmapped.
_LOOP: Final = "loop"
_DIRECT_IO: Final = "direct-io"

# A bind mount's own flags, in statvfs's numbers and in mount's.
_OF_THE_MOUNT: Final = (
    (os.ST_RDONLY, syscalls.MS_RDONLY),
    (os.ST_NOSUID, syscalls.MS_NOSUID),
    (os.ST_NODEV, syscalls.MS_NODEV),
    (os.ST_NOEXEC, syscalls.MS_NOEXEC),
    (os.ST_NOATIME, syscalls.MS_NOATIME),
    (os.ST_NODIRATIME, syscalls.MS_NODIRATIME),
    (os.ST_RELATIME, syscalls.MS_RELATIME),
    (0x2000, syscalls.MS_NOSYMFOLLOW),  # ST_NOSYMFOLLOW, which Python does not name
)
_MOUNT_ATTRIBUTES: Final = sum(flag for _, flag in _OF_THE_MOUNT) | syscalls.MS_STRICTATIME

# Seconds before each new attempt to unmount a busy mount.
_BUSY_DELAYS: Final = (0.0, 0.01, 0.03, 0.06)


class MountOptions:
    """Options in the kernel's format.

    Attributes:
        flags: the ``MS_…`` flags to set, without propagation.
        cleared: the ``MS_…`` flags that an option clears.
        propagation: the ``MS_…`` flag of propagation; 0 to leave it unchanged.
        data: the file system's own options, separated by commas.
        mappings: of users and of groups, in the kernel's format; none or both.
        loop: whether the source is a file to mount as a block device.
        direct_io: whether to bypass the cache of that file's own file system.
    """

    __slots__ = ("cleared", "data", "direct_io", "flags", "loop", "mappings", "propagation")

    def __init__(self) -> None:
        self.flags = 0
        self.cleared = 0
        self.propagation = 0
        self.data = ""
        self.mappings: Sequence[str] = ()
        self.loop = False
        self.direct_io = False


def parse_options(options: Sequence[str]) -> MountOptions:
    """Parse the options of a mount.

    Args:
        options: containerd's options; of contradicting ones, the last counts.

    Raises:
        MountOptionUnsupported: an option is not implemented.
        MountMappingInvalid: a mapping of ids is malformed, or one of the two is missing.
    """
    parsed = MountOptions()
    mappings: dict[str, str] = {}
    data = []
    for option in options:
        name = option.partition("=")[0]
        if name.partition(".")[0] in _UNSUPPORTED:
            raise MountOptionUnsupported(
                f"mount option {option!r}",
                found="an option that this shim does not implement",
                do="use a snapshotter that mounts without it (overlayfs, native)",
            )
        if name in idmapped.OPTIONS:
            mappings[name] = option
        elif option == _LOOP:
            parsed.loop = True
        elif option in _FLAGS:
            added, removed = _FLAGS[option]
            parsed.flags = parsed.flags & ~removed | added
            parsed.cleared = parsed.cleared & ~added | removed
        elif option in _PROPAGATION:
            parsed.propagation = _PROPAGATION[option]
        elif option:
            data.append(option)
    if parsed.loop and _DIRECT_IO in data:
        parsed.direct_io = True
        data = [option for option in data if option != _DIRECT_IO]
    parsed.data = ",".join(data)
    if mappings:
        parsed.mappings = idmapped.read_mappings(mappings)
    return parsed


def mount_rootfs(mounts: Sequence[Mount], rootfs: str) -> None:
    """Mount a container's root file system.

    Args:
        mounts: each as (type, source, target, options), in the order to mount. The target is a path
            below ``rootfs``, usually empty.
        rootfs: where to mount; created if missing, unless there is nothing to mount.

    Raises:
        MountOptionUnsupported: an option is not implemented.
        MountMappingInvalid: a mapping of ids is malformed, or one of the two is missing.
        MountOptionsTooLong: the layers of an overlay do not fit into a page, even shortened.
        MountTargetUnusable: ``rootfs`` or a target in it is not a directory, or is a link.
        MountFailed: the kernel refused. After any error, nothing is left mounted.
    """
    if not mounts:
        return
    # Check options before any change.
    parsed = [(mount, parse_options(mount[3])) for mount in mounts]
    _require_directory(rootfs)
    mounted: list[str] = []
    try:
        for (kind, source, target, _), options in parsed:
            _mount_at(kind, source, _resolve(rootfs, target), options, mounted)
    except BaseException:
        for point in reversed(mounted):
            try:
                _unmount_one(point, last=True)
            except UnmountFailed:
                continue  # report the error that made the mount fail
        raise


def unmount_rootfs(path: str) -> None:
    """Unmount everything at and below a path.

    Args:
        path: a path, perhaps without mounts.

    Raises:
        UnmountFailed: a mount remains after all attempts, and after detaching.
    """
    for pause in unmounting(path):
        time.sleep(pause)


def unmounting(path: str) -> Iterator[float]:
    """Yield the steps of :func:`unmount_rootfs`, for a caller that must not sleep.

    Yields:
        The seconds to wait before the next step.
    """
    # Check again in each round: of two mounts on a path, one shows up later, and another process
    # may be unmounting, too.
    remaining: list[str] = []
    for delay in (*_BUSY_DELAYS, None):
        remaining = mount_points_below(path)
        if not remaining:
            return
        if delay:
            yield delay
        for point in remaining:
            _unmount_one(point, last=delay is None)
    remaining = mount_points_below(path)
    if remaining:
        raise UnmountFailed(
            f"to unmount {path}",
            found=f"still mounted: {', '.join(remaining)}",
            do="look who uses it with fuser -m, then umount it",
        )


def compact_lowerdir(data: str) -> tuple[str, str]:
    """Shorten an overlay's options by naming its layers relative to their common directory.

    Args:
        data: the options, separated by commas.

    Returns:
        The common directory, and the shorter options; if that is impossible, "" and the unchanged
        options.
    """
    options = data.split(",")
    index = next((i for i, o in enumerate(options) if o.startswith("lowerdir=")), None)
    if index is None or "\\" in data:  # an escaped colon or comma, which no snapshotter creates
        return "", data
    layers = options[index].removeprefix("lowerdir=").split(":")
    if not all(layer.startswith("/") for layer in layers):
        return "", data
    common = os.path.commonpath(layers)
    options[index] = "lowerdir=" + ":".join(os.path.relpath(layer, common) for layer in layers)
    return common, ",".join(options)


def _mount_at(
    kind: str, source: str, target: str, options: MountOptions, mounted: list[str]
) -> None:
    """Mount one, and add it to ``mounted`` once it would have to be undone."""
    device = users = -1
    what = source  # for the error, since the source may become a loop device
    try:
        if options.mappings:
            users = idmapped.user_namespace(options.mappings)
        if options.loop:
            read_only = bool(options.flags & syscalls.MS_RDONLY)
            source, device = loop_devices.attach(
                source, read_only=read_only, direct=options.direct_io
            )
        if users >= 0 and kind == "overlay":
            layers, data = idmapped.split_layers(options.data)
            _, data = _fit_to_page(kind, data, target)
            flags = options.flags
            mount = _in_thread(lambda: idmapped.make_overlay(target, layers, data, flags, users))
            idmapped.attach(mount, target)
            mounted.append(target)
        else:
            _mount_source(kind, source, target, options, mounted)
        if options.propagation:
            syscalls.mount("", target, "", options.propagation)
        if users >= 0 and kind != "overlay":
            idmapped.replace(target, users, recursive=bool(options.flags & syscalls.MS_REC))
    except OSError as error:
        raise MountFailed(
            f"to mount {what!r} ({kind or 'no type'}) at {target}",
            found=os.strerror(error.errno or 0).lower() + _what_is_missing(what, options),
            do="the kernel's log (dmesg) may say more",
        ) from error
    finally:
        for fd in (device, users):
            if fd >= 0:
                os.close(fd)


def _mount_source(
    kind: str, source: str, target: str, options: MountOptions, mounted: list[str]
) -> None:
    directory, data = _fit_to_page(kind, options.data, target)
    is_remount = bool(options.flags & syscalls.MS_REMOUNT)
    if not is_remount or data:
        _in_directory(directory, lambda: syscalls.mount(source, target, kind, options.flags, data))
        if not is_remount:
            mounted.append(target)
    if options.flags & syscalls.MS_BIND and options.flags & _MOUNT_ATTRIBUTES:
        attributes = _attributes_of(target) & ~options.cleared | options.flags
        attributes &= ~syscalls.MS_REC  # a remount concerns one mount
        syscalls.mount("", target, "", attributes | syscalls.MS_REMOUNT)


def _attributes_of(target: str) -> int:
    """Return a mount's present flags, which a remount would clear."""
    present = os.statvfs(target).f_flag
    return sum(flag for number, flag in _OF_THE_MOUNT if present & number)


def _fit_to_page(kind: str, data: str, target: str) -> tuple[str, str]:
    page = os.sysconf("SC_PAGE_SIZE")
    if len(os.fsencode(data)) < page:
        return "", data
    directory, shorter = compact_lowerdir(data) if kind == "overlay" else ("", data)
    if len(os.fsencode(shorter)) >= page:
        raise MountOptionsTooLong(
            f"to mount {kind} at {target}",
            found=f"{len(os.fsencode(shorter))} bytes of options, and the kernel takes {page - 1}",
            do="squash the image: it has too many layers",
        )
    return directory, shorter


def _in_directory(directory: str, call: Callable[[], None]) -> None:
    """Call a function in a separate working directory.

    Threads share a working directory, but one that has unshared it can change its own. A forked
    child would be one more process for the reaper.
    """
    if not directory:
        call()
        return

    def call_there() -> None:
        syscalls.unshare(syscalls.CLONE_FS)
        os.chdir(directory)
        call()

    _in_thread(call_there)


def _in_thread(call: Callable[[], T]) -> T:
    """Call a function in a new thread, and wait for it."""
    results: list[T] = []
    errors: list[OSError | NvshimError] = []

    def call_there() -> None:
        try:
            results.append(call())
        except (OSError, NvshimError) as error:
            errors.append(error)
        finally:
            done.release()

    done = _thread.allocate_lock()
    done.acquire()
    _thread.start_new_thread(call_there, ())
    done.acquire()
    if errors:
        raise errors[0]
    return results[0]


def _require_directory(rootfs: str) -> None:
    try:
        try:
            mode = os.lstat(rootfs).st_mode
        except FileNotFoundError:
            os.mkdir(rootfs, 0o711)
            return
    except OSError as error:
        raise MountTargetUnusable(
            f"to mount at {rootfs}", found=os.strerror(error.errno or 0).lower()
        ) from error
    if not stat.S_ISDIR(mode):
        raise MountTargetUnusable(
            f"to mount at {rootfs}", found="not a directory, or a link", do="remove it"
        )


def _resolve(rootfs: str, target: str) -> str:
    """Return a mount's target: ``rootfs``, or a directory in it that the image cannot redirect."""
    if not target.strip("/"):
        return rootfs
    try:
        root = os.open(rootfs, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fd = open_in_root(root, target, os.O_PATH | os.O_DIRECTORY)
            try:
                return os.readlink(f"/proc/self/fd/{fd}")
            finally:
                os.close(fd)
        finally:
            os.close(root)
    except OSError as error:
        raise MountTargetUnusable(
            f"to mount at {target!r} in {rootfs}", found=os.strerror(error.errno or 0).lower()
        ) from error


def _unmount_one(point: str, *, last: bool) -> None:
    flags = syscalls.UMOUNT_NOFOLLOW | (syscalls.MNT_DETACH if last else 0)
    try:
        syscalls.umount(point, flags)
    except OSError as error:
        # EINVAL: another process has unmounted it; the next round finds the rest.
        if error.errno not in (errno.EBUSY, errno.EINVAL, errno.ENOENT):
            raise UnmountFailed(
                f"to unmount {point}", found=os.strerror(error.errno or 0).lower()
            ) from error


def _what_is_missing(source: str, options: MountOptions) -> str:
    """Name the missing directory: the kernel's ENOENT does not."""
    paths = [source] if options.flags & syscalls.MS_BIND else []
    for option in options.data.split(","):
        key, _, value = option.partition("=")
        if key in ("lowerdir", "upperdir", "workdir"):
            paths += value.split(":") if key == "lowerdir" else [value]
    missing = next((p for p in paths if p.startswith("/") and not os.path.lexists(p)), None)
    return f"; there is no {missing}" if missing else ""
