"""Put the driver's files into a layer, as hard links to them or to one copy of each.

The engine selects the files (:mod:`hooks.image.layer_files`). A file that cannot be in the layer is
mounted in all containers with the layer instead, so this is never an error.

==========================================  ======================================================
the driver's file and the layers            the layer gets
==========================================  ======================================================
are in one mount of a file system           a hard link: no space, and one page cache with the host
are not, but share blocks (XFS, Btrfs)      a hard link to a clone of the file: no space
are on different file systems               a hard link to a copy: once per node and driver
==========================================  ======================================================

Clones and copies are in a directory next to the layers, which :func:`sweep` cleans::

    LAYERS/.files/BOOT-KEY       KEY is a digest of the file's path and of its observed properties

Rules
- The linked file must be that of the inventory, so it is opened and compared.
- A hard link is the host's file. An overlay does not write to its lower layers, so no container can
  change it. The container sees writes by the host, as with a mount. Either way, the observed
  properties show a change of the driver.
- After the host removes a driver, its last layer frees its space.
- Clones and copies are created without a name (O_TMPFILE), so a killed process leaves nothing.
- Copies leave a fifth of the file system free: a full disk is worse than a mount. The container
  waits :data:`_PATIENCE` seconds for copies; files that are not copied by then are mounted.
- A shared lock on the directory keeps :func:`sweep` from removing files without a second name yet.

Source: link(2), open(2), ioctl_ficlone(2), statvfs(3), proc(5); kubelet's imagefs.available.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable
from typing import Final, Self

from api.values import dataclass
from hooks.image.directory import Directory
from hooks.image.layer_files import LayerFile
from hooks.image.rootfs import Rootfs
from hooks.node.fingerprint import is_observed
from hooks.plan import Mount
from shim.errors import NvshimError
from shim.files import digest, reason
from shim.work import layers

STORE: Final = ".files"

_FICLONE: Final = 0x40049409
# Attributes with a meaning to an overlay, or that give a process more rights.
_HARMFUL: Final = ("trusted.overlay.", "security.capability")
_KEPT_FREE: Final = 5  # as a divisor
_PATIENCE: Final = 1.0  # seconds
_CHUNK: Final = 1 << 24
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Put:
    """The result of putting files into a layer."""

    mounts: tuple[Mount, ...]  # those that containers with the layer do not need
    copied: int  # bytes that were copied for it
    why: str  # why the first of the other files could not be in it; "" for none


def put(directory: str, layer: str, files: Iterable[LayerFile]) -> Put:
    """Put files into a layer that no container uses yet.

    Args:
        directory: the directory of all layers.
        layer: the directory with the layer's own files.
        files: the files to put in place of empty ones.

    Raises:
        NvshimError: the layer cannot be opened.
    """
    done: list[Mount] = []
    why = ""
    parents: dict[str, Directory] = {}
    with Rootfs.open(layer) as tree, _Store(directory) as store:
        try:
            for file in files:
                above, _, name = file.path.rpartition("/")
                try:
                    parent = parents.get(above) or tree.directory(above or "/")
                    if parent is None:
                        continue
                    parents[above] = parent
                    _put_file(parent, name, file, store)
                except (OSError, NvshimError) as error:
                    why = why or f"{file.mount.source}: {_reason(error)}"
                else:
                    done.append(file.mount)
        finally:
            for parent in parents.values():
                parent.close()
        return Put(tuple(done), store.copied, why)


def _reason(error: OSError | NvshimError) -> str:
    return reason(error) if isinstance(error, OSError) else str(error)


def _put_file(parent: Directory, name: str, file: LayerFile, store: _Store) -> None:
    there = parent.stat(name)
    if there is None or not stat.S_ISREG(there.st_mode) or there.st_size:
        raise OSError(errno.EEXIST, "File exists")  # the plan has another file at this path
    fd = os.open(file.mount.source, _FILE)
    try:
        _check(fd, file)
        try:
            parent.share_file(name, fd)
        except OSError:
            copy = store.copy_of(fd, file)
            try:
                parent.share_file(name, copy)
            finally:
                os.close(copy)
    finally:
        os.close(fd)


def _check(fd: int, file: LayerFile) -> None:
    """Refuse a file that differs from the observed one, or that an overlay would change."""
    if not is_observed(os.fstat(fd), file.seen):
        raise OSError(errno.ESTALE, "Stale file handle")
    try:
        names = os.listxattr(fd)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        return  # its file system does not support attributes
    if any(name.startswith(_HARMFUL) for name in names):
        raise OSError(errno.EPERM, "Operation not permitted")


class _Store:
    """The copies of files that cannot be linked into layers; opened at the first use.

    Args:
        directory: the directory of all layers.

    Attributes:
        copied: the number of bytes that were copied.
    """

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, STORE)
        self._fd = -1
        self._deadline = time.monotonic() + _PATIENCE
        self.copied = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def copy_of(self, fd: int, file: LayerFile) -> int:
        """Return a descriptor of a file's copy, which is created if missing.

        Args:
            fd: the file, opened and checked.

        Raises:
            OSError: it cannot be created, or the file has changed meanwhile.
        """
        if self._fd < 0:
            os.makedirs(self._path, mode=0o700, exist_ok=True)
            self._fd = os.open(self._path, _DIRECTORY)
            fcntl.flock(self._fd, fcntl.LOCK_SH)
        key = repr((file.mount.source, file.seen)).encode("utf-8", "surrogateescape")
        name = layers.name_of(digest(key))
        try:
            return os.open(name, _FILE, dir_fd=self._fd)
        except FileNotFoundError:
            pass
        copy = os.open(self._path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            self._fill(copy, fd)
            _check(fd, file)
            try:
                os.link(f"/proc/self/fd/{copy}", name, dst_dir_fd=self._fd, follow_symlinks=True)
            except FileExistsError:
                pass  # another process has created it
        finally:
            os.close(copy)  # a file open for writing cannot be executed
        return os.open(name, _FILE, dir_fd=self._fd)

    def _fill(self, copy: int, fd: int) -> None:
        """Give a new file the content, owner, mode and times of another."""
        model = os.fstat(fd)
        try:
            fcntl.ioctl(copy, _FICLONE, fd)
        except OSError:
            room = os.fstatvfs(copy)
            if (room.f_bavail - room.f_blocks // _KEPT_FREE) * room.f_frsize < model.st_size:
                raise OSError(errno.ENOSPC, "No space left on device") from None
            offset = 0
            while sent := os.sendfile(copy, fd, offset, _CHUNK):
                offset += sent
                if time.monotonic() > self._deadline:
                    raise OSError(errno.ETIMEDOUT, "Connection timed out") from None
            self.copied += offset
        os.fchown(copy, model.st_uid, model.st_gid)
        os.fchmod(copy, stat.S_IMODE(model.st_mode))
        os.utime(copy, ns=(model.st_atime_ns, model.st_mtime_ns))


def sweep(directory: str) -> None:
    """Remove the copies that no layer uses.

    Args:
        directory: the directory of all layers.

    Raises:
        OSError: a copy cannot be removed.
    """
    try:
        fd = os.open(os.path.join(directory, STORE), _DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another process puts files into a layer, and sweeps later
        for name in os.listdir(fd):
            seen = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if layers.is_name(name) and stat.S_ISREG(seen.st_mode) and seen.st_nlink == 1:
                os.unlink(name, dir_fd=fd)
    finally:
        os.close(fd)
