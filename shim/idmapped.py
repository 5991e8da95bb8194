"""Mounts whose files belong to the users of a user namespace.

containerd's overlayfs snapshotter leaves it to the kernel to map the ids of an image's files: it
asks for the mapping with the options ``uidmap`` and ``gidmap``.

Rules
- A mount is mapped before it is attached, and never after: so it is a clone that is.
- An overlay is not mapped itself, its lower layers are; the upper one has the ids that the
  container writes. Before Linux 6.15 an overlay takes only layers that are attached somewhere.
  That is done in a mount namespace that a thread makes and that ends with it: nobody else sees
  them, and nothing of it is left, whatever kills the shim.
- The mapping is that of a user namespace, which takes a process to make. That one is a copy of
  us which ends at once. It sends no signal and is waited for here: a child that is none of the
  reaper's.

Source: mount_setattr(2), open_tree(2), user_namespaces(7), clone(2) __WALL; containerd
core/mount/mount_idmapped_linux.go.
"""

from __future__ import annotations

import errno
import os

from shim import syscalls
from shim.errors import MountFailed, MountMappingInvalid

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Sequence
    from typing import Final
else:
    import _signal

_LAYERS: Final = "lowerdir="
_PARTS: Final = 3
# Waits for children that send no signal, too.
_WALL: Final = 0x40000000


def read_mapping(option: str) -> str:
    """A mapping of ids as the kernel wants it.

    Args:
        option: ``uidmap=0:100000:65536``, or ``gidmap=…``, with any number of ranges.

    Raises:
        MountMappingInvalid: it is none.
    """
    ranges = [part.split(":") for part in option.partition("=")[2].split(",")]
    for numbers in ranges:
        plain = all(number.isascii() and number.isdigit() for number in numbers)
        if len(numbers) != _PARTS or not plain:
            raise MountMappingInvalid(
                f"mount option {option!r}",
                found=f"{':'.join(numbers)!r} where three numbers have to be",
                do="write ranges as container-id:host-id:size, separated by commas",
            )
    return "".join(f"{' '.join(numbers)}\n" for numbers in ranges)


def user_namespace(uids: str, gids: str) -> int:
    """Make a user namespace for its mapping alone.

    Args:
        uids: what :func:`read_mapping` returned, of users.
        gids: likewise, of groups.

    Returns:
        A descriptor of it.

    Raises:
        OSError: the kernel refused.
    """
    pid = syscalls.clone_and_end(syscalls.CLONE_NEWUSER)
    try:
        for name, mapping in (("uid_map", uids), ("gid_map", gids)):
            with open(f"/proc/{pid}/{name}", "wb", buffering=0) as file:
                file.write(mapping.encode())
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(pid, _signal.SIGKILL)  # not waited for, so the pid is still its own
        os.waitpid(pid, _WALL)


def split_layers(data: str) -> tuple[list[str], str]:
    """The lower layers of an overlay, and its options with other names for them.

    Args:
        data: the options, separated by commas.

    Returns:
        The layers, and the options in which each is named by its number.
    """
    layers: list[str] = []
    options = data.split(",")
    for index, option in enumerate(options):
        if option.startswith(_LAYERS):
            layers = option.removeprefix(_LAYERS).split(":")
            options[index] = _LAYERS + ":".join(str(number) for number in range(len(layers)))
    return layers, ",".join(options)


def make_overlay(place: str, layers: Sequence[str], data: str, flags: int, users: int) -> int:
    """Make an overlay of mapped layers.

    The calling thread changes its mount namespace, root and working directory: it has to be one
    that ends then.

    Args:
        place: a directory, in which nothing of the overlay is.
        layers: what :func:`split_layers` returned.
        data: likewise.
        flags: ``MS_…``.
        users: a user namespace that has the mapping.

    Returns:
        A descriptor of the mount, which is attached nowhere.

    Raises:
        MountFailed: a layer cannot be mapped.
        OSError: the kernel refused something else.
    """
    syscalls.unshare(syscalls.CLONE_NEWNS)
    # What others unmount meanwhile is unmounted here, too.
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
    """Put a mapped mount in the place of one.

    Args:
        target: where it is mounted.
        users: a user namespace that has the mapping.
        recursive: whether to keep what is mounted below; the ids of that stay as they are.

    Raises:
        MountFailed: it cannot be mapped.
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
    """Attach a mount, and close its descriptor.

    Args:
        mount: it.
        path: a directory.
    """
    try:
        target = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            syscalls.attach_mount(mount, target)
        finally:
            os.close(target)
    finally:
        os.close(mount)
