"""An open directory of an image, whose entries are accessed by single names.

:meth:`hooks.image.rootfs.Rootfs.directory` resolves a path once. From then on, the descriptor is
the directory, even if the path changes. The methods here take one name, without a slash, and follow
no link, so they cannot leave the directory.

- A file is first opened as a mere location (O_PATH has no side effect on FIFOs and devices). If
  that is a regular file of bounded size, it is opened for reading through that descriptor, so
  another file cannot take its place in between.
- A file or link appears as a whole or not at all. It is created directly if its name is free, and
  otherwise under a temporary name that replaces the old file by rename(2). There is no fsync,
  because the files are written again for every container.
- A new file belongs to the owner of its directory: in a user namespace to the container's root,
  elsewhere to root. Its owner is changed through a descriptor, and only while it is new and empty,
  because another process could have renamed a different file to its place.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Final, Self

from api.errors import ErrorRow
from hooks.errors import RootfsError
from hooks.image.rootfs_errors import (
    DirectoryInTheWay,
    FileTooLarge,
    NotARegularFile,
    PathRefused,
    RootfsBusy,
    RootfsIo,
    RootfsReadOnly,
)

LONGEST_FILE: Final = 1 << 20
"""The default limit of a file's bytes; no configuration is longer."""

MOST_NAMES: Final = 20_000
"""The default limit of a directory's names."""

_MODE: Final = 0o644

_MEANING: Final[dict[int, tuple[type[RootfsError] | ErrorRow[RootfsError], str, str]]] = {
    errno.ENOENT: (PathRefused, "the path leads nowhere inside the image", ""),
    errno.ENOTDIR: (PathRefused, "something on the way is not a directory", ""),
    errno.ELOOP: (PathRefused, "links that go in circles or through procfs", ""),
    errno.ENAMETOOLONG: (PathRefused, "a name or path that is too long", ""),
    errno.EXDEV: (PathRefused, "a link that leaves the image", ""),
    errno.EINVAL: (PathRefused, "a name this file system does not take", ""),
    errno.EISDIR: (DirectoryInTheWay, "a directory", "remove it from the image"),
    errno.EEXIST: (DirectoryInTheWay, "something that cannot be replaced", ""),
    errno.ENOTEMPTY: (DirectoryInTheWay, "a directory with files in it", ""),
    errno.EAGAIN: (RootfsBusy, "a process that keeps renaming directories below it", "try again"),
    errno.EROFS: (RootfsReadOnly, "a read-only file system", "use a writable snapshot"),
}
"""errno → its meaning for an image. Any other error is a failure of the file system."""

_KIND: Final = {
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
    stat.S_IFLNK: "symbolic link",
}


class Directory:
    """A directory of an image. A context manager: leaving it closes the descriptor.

    Every method raises :class:`RootfsError` on any failure, and PathRefused for a path of several
    names. After a failed change, the name still refers to the same file as before.

    Args:
        fd: a descriptor of the directory (O_PATH suffices), now owned by this object.
        path: its path in the image, only for messages.
    """

    __slots__ = ("_fd", "_masked", "_owner", "path")

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._owner: tuple[int, int] | None = None
        self._masked: bool | None = None
        self.path = path

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stat(self, name: str) -> os.stat_result | None:
        """Return the status of this name, without following a link; None if it is unused."""
        self._check("look at", name)
        try:
            return os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise meaning(self._asked("look at", name), error) from error

    def read_link(self, name: str) -> str:
        """Return the target of the link with this name."""
        with self._at("read the link", name):
            return os.readlink(name, dir_fd=self._fd)

    def read_file(self, name: str, limit: int = LONGEST_FILE) -> bytes:
        """Return the content of the regular file with this name, which must not be a link.

        Raises:
            NotARegularFile: the name is that of something else.
            FileTooLarge: it is longer than ``limit`` bytes.
        """
        with self._at("read", name) as asked:
            location = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
            try:
                fd = open_regular(location, asked)
            finally:
                os.close(location)
            return read_all(fd, limit, asked)

    def names(self, name: str, limit: int = MOST_NAMES) -> tuple[str, ...]:
        """Return the names in the directory with this name, sorted.

        Raises:
            FileTooLarge: there are more than ``limit`` names.
        """
        with self._at("list", name) as asked:
            fd = os.open(name, _LIST | os.O_NOFOLLOW, dir_fd=self._fd)
            try:
                return list_names(fd, limit, asked)
            finally:
                os.close(fd)

    def write_file(
        self, name: str, data: bytes, *, like: os.stat_result | None = None, mode: int = _MODE
    ) -> None:
        """Write a file with this name, replacing a file or link that has it.

        Args:
            like: a file with the mode, owner and times for the new file. Without it, mode and owner
                are those of the replaced file, or ``mode`` and the directory's owner.

        Raises:
            DirectoryInTheWay: a directory has this name.
        """
        with self._at("write", name):
            model = like or self.stat(name)
            if model is not None and not stat.S_ISREG(model.st_mode):
                model = None
            with self._temporary(name) as temporary:
                fd = os.open(temporary, _CREATE, 0o600, dir_fd=self._fd)
                try:
                    _write_all(fd, data)
                    owner = model or os.fstat(self._fd)
                    os.fchown(fd, owner.st_uid, owner.st_gid)
                    # Without the set-user-id bits, which were for another content.
                    os.fchmod(fd, model.st_mode & 0o777 if model else mode)
                    if like is not None:
                        os.utime(fd, ns=(like.st_atime_ns, like.st_mtime_ns))
                finally:
                    os.close(fd)

    def create_empty(self, name: str) -> bool:
        """Create an empty file; return False if the name is in use."""
        self._check("make", name)
        try:
            # One call instead of three, because a container needs dozens of these.
            os.mknod(name, stat.S_IFREG | _MODE, dir_fd=self._fd)
            self._adopt(name, stat.S_IFREG)
        except FileExistsError:
            return False
        except OSError as error:
            raise meaning(self._asked("make", name), error) from error
        return True

    def create_link(self, name: str, target: str) -> bool:
        """Create a link, whose target need not exist; return False if the name is in use."""
        self._check("link", name)
        try:
            self._link(name, target)
        except FileExistsError:
            return False
        except OSError as error:
            raise meaning(self._asked("link", name), error) from error
        return True

    def share_file(self, name: str, fd: int) -> None:
        """Create a hard link to an open file, replacing a file or link with this name.

        Args:
            fd: a file of the host, on this file system.

        Raises:
            OSError: the file cannot get another name here (EXDEV, EMLINK, EPERM, …).
        """
        self._check("share", name)
        with self._temporary(name) as temporary:
            os.link(f"/proc/self/fd/{fd}", temporary, dst_dir_fd=self._fd, follow_symlinks=True)

    def make_link(self, name: str, target: str) -> None:
        """Create a link with this name, replacing a file or link that has it.

        Raises:
            DirectoryInTheWay: a directory has this name.
        """
        if self.create_link(name, target):
            return
        with self._at("link", name), self._temporary(name) as temporary:
            self._link(temporary, target)

    def make_directory(self, name: str) -> Directory:
        """Create a directory with an unused name, and open it."""
        with self._at("make the directory", name):
            os.mkdir(name, 0o755, dir_fd=self._fd)
            try:
                fd = os.open(name, _LIST | os.O_NOFOLLOW, dir_fd=self._fd)
                try:
                    if _is_new(os.fstat(fd), stat.S_IFDIR) and _is_empty(fd):
                        if self._foreign_owner is not None:
                            os.fchown(fd, *self._foreign_owner)
                        os.fchmod(fd, 0o755)  # whatever the umask is
                except OSError:
                    os.close(fd)
                    raise
            except OSError:
                with suppress(OSError):  # another process may have replaced it
                    os.rmdir(name, dir_fd=self._fd)
                raise
            return Directory(fd, f"{self.path.rstrip('/')}/{name}")

    def rename(self, old: str, new: str) -> None:
        """Rename ``old`` to ``new``, replacing a file of that name."""
        with self._at("rename", old), self._at("rename to", new):
            os.rename(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        """Remove the file, link, FIFO, socket or device of this name, if there is one."""
        with self._at("remove", name), suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def remove_directory(self, name: str) -> None:
        """Remove the empty directory of this name."""
        with self._at("remove", name):
            os.rmdir(name, dir_fd=self._fd)

    @contextmanager
    def _at(self, verb: str, name: str) -> Iterator[str]:
        """Check the name, and turn an OSError in the with-block into one of ours."""
        self._check(verb, name)
        asked = self._asked(verb, name)
        try:
            yield asked
        except OSError as error:
            raise meaning(asked, error) from error

    def _check(self, verb: str, name: str) -> None:
        """Refuse a path that is not a single name."""
        if "/" in name or "\0" in name or name in {"", ".", ".."}:
            raise PathRefused(self._asked(verb, name), found="not a single name")

    def _asked(self, verb: str, name: str) -> str:
        return f"to {verb} {self.path.rstrip('/')}/{name} in the image"

    @contextmanager
    def _temporary(self, name: str) -> Iterator[str]:
        """Yield a temporary name, which is renamed to ``name`` at the end."""
        temporary = f".nvshim-{os.urandom(8).hex()}"
        try:
            yield temporary
            os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            with suppress(FileNotFoundError):  # it may never have been created
                os.unlink(temporary, dir_fd=self._fd)
            raise

    def _link(self, name: str, target: str) -> None:
        os.symlink(target, name, dir_fd=self._fd)
        self._adopt(name, stat.S_IFLNK)

    @property
    def _foreign_owner(self) -> tuple[int, int] | None:
        """Return the directory's owner and group; None if both are root."""
        if self._owner is None:
            seen = os.fstat(self._fd)
            self._owner = (seen.st_uid, seen.st_gid)
        return None if self._owner == (0, 0) else self._owner

    def _is_masked(self, name: str) -> bool:
        """Whether the umask has removed permissions from a new file; the answer is cached.

        The umask itself is not read, because that requires setting it, for all threads.
        """
        if self._masked is None:
            seen = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            self._masked = stat.S_IMODE(seen.st_mode) != _MODE
        return self._masked

    def _adopt(self, name: str, kind: int) -> None:
        """Give a new entry the directory's owner, and a file its mode regardless of the umask."""
        is_masked = kind == stat.S_IFREG and self._is_masked(name)
        if self._foreign_owner is None and not is_masked:
            return
        location = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            if _is_new(os.fstat(location), kind):
                # Not fchown(2), which rejects O_PATH descriptors. This does not follow a link.
                itself = f"/proc/self/fd/{location}"
                if is_masked:
                    os.chmod(itself, _MODE)
                if self._foreign_owner is not None:
                    os.chown(itself, *self._foreign_owner)
        finally:
            os.close(location)


def _is_new(seen: os.stat_result, kind: int) -> bool:
    """Whether this may be our new entry: new, empty and ours."""
    is_empty = kind != stat.S_IFREG or (seen.st_size == 0 and seen.st_nlink == 1)
    return stat.S_IFMT(seen.st_mode) == kind and seen.st_uid == os.geteuid() and is_empty


def _is_empty(fd: int) -> bool:
    with os.scandir(fd) as entries:
        return next(entries, None) is None


_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LIST: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC


def meaning(asked: str, error: OSError) -> RootfsError:
    """Convert ``error`` from an image to one of our errors."""
    kind, found, do = _MEANING.get(error.errno or 0, (RootfsIo, str(error.strerror), ""))
    return kind(asked, found=found, do=do)


def open_regular(location: int, asked: str) -> int:
    """Open the file of an O_PATH descriptor for reading, as a new descriptor.

    Args:
        location: the descriptor; stays open.

    Raises:
        NotARegularFile: it is another kind of file, and was not opened.
        OSError: it cannot be opened.
    """
    mode = os.fstat(location).st_mode
    if not stat.S_ISREG(mode):
        raise NotARegularFile(asked, found=f"a {_KIND[stat.S_IFMT(mode)]}")
    # The descriptor's link in our procfs leads to the inode that was just checked.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    return os.open(f"/proc/self/fd/{location}", flags)


def read_all(fd: int, limit: int, asked: str) -> bytes:
    """Read a regular file to its end, and close it.

    Args:
        limit: the maximum size in bytes.

    Raises:
        FileTooLarge: it is longer. The size is checked before the first read and, in case the file
            grows, while reading.
        OSError: it cannot be read.
    """
    try:
        parts = []
        room = limit + 1 if os.fstat(fd).st_size <= limit else 0
        while room > 0 and (part := os.read(fd, min(room, LONGEST_FILE))):
            parts.append(part)
            room -= len(part)
        if room <= 0:
            raise FileTooLarge(asked, found=f"a file of more than {limit} bytes")
        return b"".join(parts)
    finally:
        os.close(fd)


def list_names(fd: int, limit: int, asked: str) -> tuple[str, ...]:
    """Return the names in the directory ``fd``, which stays open; at most ``limit`` are read.

    Raises:
        FileTooLarge: there are more names.
        OSError: it cannot be read.
    """
    with os.scandir(fd) as entries:
        names = [entry.name for entry in islice(entries, limit + 1)]
    if len(names) > limit:
        raise FileTooLarge(asked, found=f"a directory of more than {limit} names")
    return tuple(sorted(names))


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
