"""Mounts whose files belong to the users of a user namespace.

containerd's overlayfs snapshotter lets the kernel map the ids of an image's files. It requests the
mapping with the options ``uidmap`` and ``gidmap``.

Rules
- The kernel maps only unattached mounts. So a clone of the mount is mapped.
- For an overlay, the lower layers are mapped, not the overlay; the upper layer has the ids that the
  container writes. Before Linux 6.15 an overlay accepts only attached layers. So a thread attaches
  them in its own mount namespace, which ends with it: no other process sees them, and nothing is
  left if the shim is killed.
- The mapping is that of a user namespace, which only a process can create. Ours is a clone of the
  shim that exits at once. It sends no signal, and this module, not the reaper, waits for it.

Source: mount_setattr(2), open_tree(2), user_namespaces(7), clone(2) __WALL; containerd
core/mount/mount_idmapped_linux.go.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Final

from shim import syscalls
from shim.errors import MountFailed, MountMappingInvalid

_LAYERS: Final = "lowerdir="
_PARTS: Final = 3
# Also waits for children that send no signal.
_WALL: Final = 0x40000000

OPTIONS: Final = ("uidmap", "gidmap")
"""The options that request a mapping, of users and of groups."""


def read_mappings(options: Mapping[str, str]) -> tuple[str, ...]:
    """Parse the mappings in mount options, in the kernel's format; users first.

    Args:
        options: the options by name: ``uidmap=0:100000:65536`` and ``gidmap=…``, each with any
            number of ranges.

    Raises:
        MountMappingInvalid: an option is malformed or missing.
    """
    missing = [name for name in OPTIONS if name not in options]
    if missing:
        raise MountMappingInvalid(
            f"mount option {', '.join(options.values())!r}",
            found=f"no {missing[0]} with it",
            do="map users and groups, or neither",
        )
    return tuple(_read_mapping(options[name]) for name in OPTIONS)


def _read_mapping(option: str) -> str:
    ranges = [part.split(":") for part in option.partition("=")[2].split(",")]
    for numbers in ranges:
        plain = all(number.isascii() and number.isdigit() for number in numbers)
        if len(numbers) != _PARTS or not plain:
            raise MountMappingInvalid(
                f"mount option {option!r}",
                found=f"{':'.join(numbers)!r} instead of three numbers",
                do="write ranges as container-id:host-id:size, separated by commas",
            )
    return "".join(f"{' '.join(numbers)}\n" for numbers in ranges)


def user_namespace(mappings: Sequence[str]) -> int:
    """Create a user namespace only for its mapping, and return a descriptor of it.

    Args:
        mappings: the result of :func:`read_mappings`.

    Raises:
        MountFailed: the kernel refused.
    """
    try:
        return _user_namespace(mappings)
    except OSError as error:
        raise MountFailed(
            f"a user namespace to map ids by: {'; '.join(mappings)}",
            found=os.strerror(error.errno or 0).lower(),
            do="the ranges, or the limits below /proc/sys/user, may be why",
        ) from error


def _user_namespace(mappings: Sequence[str]) -> int:
    pid = syscalls.clone_and_end(syscalls.CLONE_NEWUSER)
    try:
        for name, mapping in zip(("uid_map", "gid_map"), mappings, strict=True):
            with open(f"/proc/{pid}/{name}", "wb", buffering=0) as file:
                file.write(mapping.encode())
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(pid, signal.SIGKILL)  # not reaped, so the pid is still its own
        os.waitpid(pid, _WALL)


def split_layers(data: str) -> tuple[list[str], str]:
    """Return an overlay's lower layers, and its options with numbers instead of layers.

    Args:
        data: the options, separated by commas.
    """
    layers: list[str] = []
    options = data.split(",")
    for index, option in enumerate(options):
        if option.startswith(_LAYERS):
            layers = option.removeprefix(_LAYERS).split(":")
            options[index] = _LAYERS + ":".join(str(number) for number in range(len(layers)))
    return layers, ",".join(options)


def make_overlay(place: str, layers: Sequence[str], data: str, flags: int, users: int) -> int:
    """Create an overlay of mapped layers.

    The calling thread changes its mount namespace, root and working directory, so it must end
    afterwards.

    Args:
        place: a directory without any part of the overlay.
        layers: the layers from :func:`split_layers`.
        data: the options from :func:`split_layers`.
        flags: the ``MS_…`` flags.
        users: a user namespace with the mapping.

    Returns:
        A descriptor of the unattached mount.

    Raises:
        MountFailed: a layer cannot be mapped.
        OSError: the kernel refused something else.
    """
    syscalls.unshare(syscalls.CLONE_NEWNS)
    # Mounts that others unmount meanwhile are unmounted here, too.
    syscalls.mount("", "/", "", syscalls.MS_SLAVE | syscalls.MS_REC)
    syscalls.mount("tmpfs", place, "tmpfs", 0, "mode=0700")
    os.chdir(place)
    for number, layer in enumerate(layers):
        os.mkdir(str(number))
        attach(_mapped(layer, users), str(number))
    os.mkdir("root")
    syscalls.mount("overlay", "root", "overlay", flags, data)
    return syscalls.clone_mount("root")


def replace(target: str, users: int, *, recursive: bool) -> None:
    """Replace a mount with a mapped clone of it.

    Args:
        target: the mount point.
        users: a user namespace with the mapping.
        recursive: whether to keep nested mounts, whose ids are not mapped.

    Raises:
        MountFailed: the mount cannot be mapped.
        OSError: the kernel refused something else.
    """
    mount = _mapped(target, users, recursive=recursive)
    try:
        syscalls.umount(target, syscalls.UMOUNT_NOFOLLOW | syscalls.MNT_DETACH)
    except OSError:
        os.close(mount)
        raise
    attach(mount, target)


def _mapped(path: str, users: int, *, recursive: bool = False) -> int:
    mount = syscalls.clone_mount(path, recursive=recursive, follow=True)
    try:
        syscalls.map_ids(mount, users)
    except OSError as error:
        os.close(mount)
        if error.errno != errno.EINVAL:
            raise
        raise MountFailed(
            f"to map the ids of {path}",
            found="a file system on which the kernel cannot do that, or whose ids are mapped",
            do="use a snapshotter or a kernel that can, or let containerd change the owners"
            " (slow_chown)",
        ) from error
    return mount


def attach(mount: int, path: str) -> None:
    """Attach a mount at a directory, and close its descriptor."""
    try:
        target = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            syscalls.attach_mount(mount, target)
        finally:
            os.close(target)
    finally:
        os.close(mount)
