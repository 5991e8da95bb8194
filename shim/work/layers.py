"""Layers of injected files that containers of one image share.

Containers of the same image with the same devices need the same files. These are created once, in a
directory that becomes an additional layer of each container's overlay. Nothing is written per
container, or into its own snapshot::

    DIRECTORY/                   owned by root alone
        BOOT-KEY/                a layer; KEY is a digest of all that it depends on
            fs/                  its files
            note                 what was decided when it was made
            inventory            the id of the node's inventory that it was made from
        .new-RANDOM/             one that is being made
        .old-RANDOM/             one that is being removed

Rules
- A layer is created under another name and renamed when complete. Of two created at the same time,
  the first wins, and both containers use it. Nothing is synced: a layer is used only until the next
  boot.
- A shim holds a shared lock on the directory while its container is mounted. The kernel releases a
  killed shim's lock, so a layer that is part of a mount also counts as used.
- When a layer is created and there are more than :data:`MOST`, unused ones are removed, the least
  recently used first. Layers of another boot or inventory, and remains of killed processes, are
  always removed: their files may hold the space of a removed driver
  (:mod:`shim.work.driver_files`). Anything without a layer's name stays, because the directory may
  have had another use before.
- A layer is filled through an overlay of the image's layers below it. This mount is detached at
  once: no other process sees it, and it ends with its descriptor.
- A layer is always a lower layer of an overlay, so the kernel never writes to it. Nothing in it is
  bind mounted: a container that may mount could make such a mount writable, and write into others'
  files.
- A failure concerns only the layer: :func:`find` and :func:`make` return None or raise, and the
  container is created without one.

Source: flock(2), rename(2), mount(2); Documentation/filesystems/overlayfs.rst of the kernel.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import Final

from shim import files, syscalls
from shim.errors import NvshimError
from shim.rootfs import mounts
from shim.rootfs.overlay import Overlay

Fill = Callable[[int, str], bytes]

MOST: Final = 128
"""The number of layers to keep; each has about a hundred names and a few hundred kilobytes."""

AT_ONCE: Final = 8
"""The most layers to remove when one is created, while its container waits, perhaps for a disk."""

_FILES: Final = "fs"
_NOTE: Final = "note"
_INVENTORY: Final = "inventory"
_NEW: Final = ".new-"
_OLD: Final = ".old-"
_LONGEST_NOTE: Final = 4 << 20
_LONGEST_ID: Final = 64
_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_BOOT_DIGITS: Final = 8
_KEY_DIGITS: Final = 64
_RANDOM_DIGITS: Final = 16
_HEXADECIMAL: Final = frozenset("0123456789abcdef")
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
# Seconds in which a layer's use is not noted again.
_RECENTLY: Final = 60.0


class Layer:
    """A held layer, which is not removed before :meth:`close`.

    Attributes:
        fd: the descriptor that holds it; a duplicate holds it, too.
        files: the directory with its files.
        note: the decision with which it was created.
    """

    __slots__ = ("fd", "files", "note")

    def __init__(self, fd: int, path: str, note: bytes) -> None:
        self.fd = fd
        self.files = os.path.join(path, _FILES)
        self.note = note

    def close(self) -> None:
        """Release the layer; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def name_of(key: str) -> str:
    """Return the name of a layer in its directory.

    Args:
        key: the hexadecimal SHA-256 of its dependencies.
    """
    return f"{_boot()}-{key}"


def find(directory: str, name: str) -> Layer | None:
    """Hold an existing layer.

    Args:
        directory: the directory of all layers.
        name: the layer's name.

    Returns:
        The layer; None if it is missing or unusable.
    """
    path = os.path.join(directory, name)
    try:
        if not _is_ours(os.stat(directory, follow_symlinks=False)):
            return None
        fd = os.open(path, _OPEN)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        seen = os.fstat(fd)
        # It may have been removed before the lock.
        if _is_ours(seen) and os.path.samestat(seen, os.stat(path, follow_symlinks=False)):
            note = files.read(os.path.join(path, _NOTE), _LONGEST_NOTE)
            if time.time() - seen.st_mtime > _RECENTLY:
                os.utime(fd)
            return Layer(fd, path, note)
    except (OSError, NvshimError):
        pass  # it is being removed
    os.close(fd)
    return None


def note_used_last(directory: str) -> bytes:
    """Return the note of the layer that was used last; "" if there is none.

    Args:
        directory: the directory of all layers.

    Raises:
        OSError: the directory cannot be read.
        NvshimError: the note cannot be read.
    """
    boot = f"{_boot()}-"
    names = [name for name in os.listdir(directory) if name.startswith(boot)]
    if not names or not _is_ours(os.stat(directory, follow_symlinks=False)):
        return b""
    last = max(names, key=lambda name: _used(directory, name))
    return files.read(os.path.join(directory, last, _NOTE), _LONGEST_NOTE)


def make(
    directory: str, name: str, overlay: Overlay, fill: Fill, inventory: str = ""
) -> Layer | None:
    """Create a layer, and hold it.

    Args:
        directory: the directory of all layers; created if missing.
        name: the layer's name.
        overlay: the overlay of its first container.
        fill: takes a descriptor of a root, which it closes, and the layer's directory. It writes
            files below the root, may then add to the directory, which contains them, and returns
            the note.
        inventory: the id of the layer's inventory.

    Returns:
        The layer; None if layers and the overlay's upper directory cannot share a file system,
        because a container would then see device and inode numbers change.

    Raises:
        OSError: it could not be created; nothing is left of it.
        NvshimError: ``fill`` failed; nothing is left of it.
    """
    os.makedirs(directory, mode=0o700, exist_ok=True)
    seen = os.stat(directory, follow_symlinks=False)
    if not _is_ours(seen) or seen.st_dev != overlay.upper.st_dev:
        return None
    path = os.path.join(directory, f"{_NEW}{_random()}")
    final = os.path.join(directory, name)
    os.mkdir(path, 0o700)
    fd = -1
    try:
        fd = os.open(path, _OPEN)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        note = _fill(path, overlay, fill)
        files.write(os.path.join(path, _NOTE), note)
        files.write(os.path.join(path, _INVENTORY), inventory.encode())
        if _take_name(path, final):
            return Layer(fd, final, note)
    except BaseException:
        _discard(path, fd)
        raise
    _discard(path, fd)
    return find(directory, name)


def _take_name(path: str, name: str) -> bool:
    """Give a complete layer its name; return False if another has it."""
    try:
        os.rename(path, name)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    return True


def _fill(path: str, overlay: Overlay, fill: Fill) -> bytes:
    """Write a layer's files through an overlay that has it on top."""
    top, work, root = (os.path.join(path, name) for name in (_FILES, "work", "root"))
    for each in (top, work, root):
        os.mkdir(each, 0o700)
    # A file at the top of a tree belongs to the tree's owner.
    os.chown(top, overlay.upper.st_uid, overlay.upper.st_gid)
    os.chmod(top, stat.S_IMODE(overlay.upper.st_mode))
    options = ",".join(overlay.options("", top, work))
    try:
        # Do not sync a layer, or the whole disk for it: that takes milliseconds.
        syscalls.mount("overlay", root, "overlay", 0, f"{options},volatile")
    except OSError:
        syscalls.mount("overlay", root, "overlay", 0, options)
    try:
        tree = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        syscalls.umount(root, syscalls.UMOUNT_NOFOLLOW | syscalls.MNT_DETACH)
    note = fill(tree, top)
    files.remove_tree(work)
    os.rmdir(root)
    return note


def collect(directory: str, most: int = MOST, inventory: str = "") -> None:
    """Remove unused layers, at most :data:`AT_ONCE`.

    Args:
        directory: the directory of all layers.
        most: how many layers of this boot to keep, used or not.
        inventory: the id of the node's current inventory; "" to keep layers of others, too.

    Raises:
        OSError: something could not be read or removed; the rest is left for later.
        NvshimError: as for OSError.
    """
    boot = f"{_boot()}-"
    found = [name for name in os.listdir(directory) if is_name(name)]
    names = sorted(found, key=lambda name: _used(directory, name), reverse=True)
    kept = [
        name
        for name in names
        if name.startswith(boot) and inventory in ("", inventory_of(directory, name))
    ]
    failed: NvshimError | OSError | None = None
    removed = 0
    for name in (*kept[most:], *(name for name in names if name not in kept)):
        if removed == AT_ONCE:
            break
        try:
            removed += _remove(directory, name)
        except (NvshimError, OSError) as error:
            failed = error  # one failure must not keep all others
    if failed is not None:
        raise failed


def remove_unused(path: str) -> None:
    """Remove a layer if no container uses it.

    Args:
        path: the path of the layer.

    Raises:
        OSError: it could not be removed.
    """
    directory, name = os.path.split(path)
    if is_name(name):  # another process may have removed it already
        _remove(directory, name)


def inventory_of(directory: str, name: str) -> str:
    """Return the id of a layer's inventory; "" if unknown.

    Args:
        directory: the directory of all layers.
        name: the layer's name.
    """
    try:
        return files.read(os.path.join(directory, name, _INVENTORY), _LONGEST_ID).decode("ascii")
    except (NvshimError, ValueError):
        return ""


def is_name(name: str) -> bool:
    """Whether this is the name of a layer.

    The directory may have other uses, such as the top of a file system with a user's files, so
    nothing without a layer's name may change.
    """
    for prefix, digits in ((_NEW, _RANDOM_DIGITS), (_OLD, _RANDOM_DIGITS)):
        if name.startswith(prefix):
            return _is_hexadecimal(name.removeprefix(prefix), digits)
    boot, dash, key = name.partition("-")
    return bool(dash) and _is_hexadecimal(boot, _BOOT_DIGITS) and _is_hexadecimal(key, _KEY_DIGITS)


def _is_hexadecimal(text: str, digits: int) -> bool:
    return len(text) == digits and _HEXADECIMAL.issuperset(text)


def _remove(directory: str, name: str) -> bool:
    """Remove a layer unless it is in use; return whether it was removed."""
    path = os.path.join(directory, name)
    for fd in _opened(path):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        if name.startswith(_NEW):
            # Its creator was killed at the only moment when it is visible; no process can use it.
            for _ in mounts.unmounting(path):
                pass
        # Check under the lock: a shim may have mounted it before it was killed.
        elif os.fsencode(name) in _mount_table():
            continue
        aside = os.path.join(directory, f"{_OLD}{_random()}")
        os.rename(path, aside)
        files.remove_tree(aside)
        return True
    return False


def _opened(path: str) -> Iterator[int]:
    """Yield a descriptor of a directory, if it still exists, and close it."""
    try:
        fd = os.open(path, _OPEN)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _discard(path: str, fd: int) -> None:
    if fd >= 0:
        os.close(fd)
    try:
        files.remove_tree(path)
    except OSError:
        pass  # the first error is the one to report; the next collection removes it


def _used(directory: str, name: str) -> float:
    try:
        return os.stat(os.path.join(directory, name), follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return 0.0


def _is_ours(seen: os.stat_result) -> bool:
    is_directory = stat.S_ISDIR(seen.st_mode)
    return is_directory and seen.st_uid == os.geteuid() and not seen.st_mode & _OTHERS_MAY_WRITE


def _boot() -> str:
    with open(_BOOT_ID, encoding="ascii") as file:
        return file.read(_BOOT_DIGITS)


def _random() -> str:
    return os.urandom(_RANDOM_DIGITS // 2).hex()


def _mount_table() -> bytes:
    with open("/proc/thread-self/mountinfo", "rb") as file:
        return file.read()
