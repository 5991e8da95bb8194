"""The one object through which anything of an image is read or written.

An image is hostile: any component of any path in it may be a link to anywhere, any file a
FIFO that blocks, a device that acts when opened, or five sparse gigabytes; and a process that
shares the tree may exchange any of these for another at any time.

Rules
- The root is a directory descriptor. This module knows no path of it, and gives none away,
  so nothing can be joined below it.
- Every resolution of more than one component is one openat2(2) that cannot leave the root
  (:mod:`hooks.openat2`). Its result is a descriptor, and only the descriptor is used.
- A write resolves the parent directory once, then works on single names in that directory
  by ``*at`` calls that follow no link.
- What is read is opened as a mere location first (O_PATH, which has no side effect on
  FIFOs and devices), found to be a regular file of bounded size, and only then opened, by
  its descriptor: nobody can put another file in between.
- Files and links appear by rename(2), whole or not at all. There is no fsync: what is
  written here is made again for every container.
- New things belong to whoever owns the directory they are put in. In a user namespace that
  is the container's root, elsewhere it is root.

Looking (:meth:`Rootfs.stat`, ``read_file``, ``names``, …) answers None where a program in
the container would find nothing either: no such path, a dangling or cyclic link. Writing
raises. Paths are absolute inside the image, without "..".
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Final, Self

from hooks.openat2 import open_in_root
from hooks.rootfs_errors import (
    DirectoryInTheWay,
    FileTooLarge,
    KernelTooOld,
    NotARegularFile,
    PathRefused,
    RootfsBusy,
    RootfsIo,
    RootfsReadOnly,
    RootfsUnavailable,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from hooks.errors import RootfsError

__all__ = ["LONGEST_FILE", "Rootfs", "components"]

LONGEST_FILE: Final = 1 << 20
"""Bytes that :meth:`Rootfs.read_file` reads unless told otherwise: no configuration is longer."""

_MOST_NAMES: Final = 20_000
_DEEPEST: Final = 64

_NOTHING_THERE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""How the kernel says that a path leads nowhere; a cycle and a magic link are ELOOP."""

_MEANING: Final[dict[int, tuple[type[RootfsError], str, str]]] = {
    errno.ENOENT: (PathRefused, "the path leads nowhere inside the image", ""),
    errno.ENOTDIR: (PathRefused, "something on the way is not a directory", ""),
    errno.ELOOP: (PathRefused, "links that go in circles or through procfs", ""),
    errno.ENAMETOOLONG: (PathRefused, "a name or path that is too long", ""),
    errno.EXDEV: (PathRefused, "a link that leaves the image", ""),
    errno.EINVAL: (PathRefused, "a name this file system does not take", ""),
    errno.EISDIR: (DirectoryInTheWay, "a directory", "remove it from the image"),
    errno.EEXIST: (DirectoryInTheWay, "something that cannot be replaced", ""),
    errno.ENOTEMPTY: (DirectoryInTheWay, "a directory with files in it", ""),
    errno.EAGAIN: (RootfsBusy, "somebody who keeps renaming directories below it", "try again"),
    errno.EROFS: (RootfsReadOnly, "a read-only file system", "use a writable snapshot"),
}
"""errno → what it means about an image. Anything else is the file system's own failure."""


def components(path: str) -> list[str]:
    """The names on the way to ``path``.

    Args:
        path: absolute inside the image.

    Returns:
        Its names, without empty ones and ".".

    Raises:
        PathRefused: ``path`` is relative, has a ".." or a NUL in it, or is absurdly deep.
    """
    names = [name for name in path.split("/") if name not in {"", "."}]
    if not path.startswith("/") or ".." in names or "\0" in path or len(names) > _DEEPEST:
        raise PathRefused(
            f"the path {path!r} in the image",
            found="it is relative, has '..' or a NUL in it, or is too deep",
            do="use a plain absolute path",
        )
    return names


class Rootfs:
    """A root file system, held as a directory descriptor.

    A context manager: leaving it closes the descriptor.

    Args:
        fd: a directory descriptor (O_PATH suffices), owned by this object from now on.
    """

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def open(cls, path: str) -> Self:
        """Opens the rootfs at ``path``, a directory of the host that we made or mounted.

        Args:
            path: on the host; not a path an image or container has a say in.

        Returns:
            The open rootfs.

        Raises:
            RootfsUnavailable: ``path`` is not a directory that can be opened.
            KernelTooOld: openat2(2) does not work here.
        """
        try:
            fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise RootfsUnavailable(
                f"the rootfs {path}",
                found=str(error.strerror),
                do="look whether its mounts were made",
            ) from error
        try:
            os.close(open_in_root(fd, ".", os.O_PATH | os.O_DIRECTORY))
        except OSError as error:
            os.close(fd)
            raise KernelTooOld(
                f"to look into the rootfs {path} safely",
                found=f"openat2(2) answers {error.strerror}",
                do="run Linux 5.6 or newer, and allow openat2 in seccomp filters around the shim",
            ) from error
        return cls(fd)

    def close(self) -> None:
        """Closes the descriptor; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # Looking

    def is_writable(self) -> bool:
        """Whether the file system and its mount take writes; nothing is written to find out."""
        return not os.fstatvfs(self._fd).f_flag & os.ST_RDONLY

    def stat(self, path: str, *, follow: bool = True) -> os.stat_result | None:
        """What is at ``path``; with ``follow`` off, a link itself and not what it leads to."""
        with self._looking(path, os.O_PATH | (0 if follow else os.O_NOFOLLOW)) as fd:
            return None if fd is None else os.fstat(fd)

    def read_link(self, path: str) -> str | None:
        """The target of the link at ``path``, as it is written; None if there is no link."""
        with self._looking(path, os.O_PATH | os.O_NOFOLLOW) as fd:
            if fd is None or not stat.S_ISLNK(os.fstat(fd).st_mode):
                return None
            return os.readlink("", dir_fd=fd)

    def real_path(self, path: str) -> str | None:
        """Where ``path`` really is, after all links, as an absolute path inside the image."""
        with self._looking(path, os.O_PATH) as fd:
            return None if fd is None else self._place_of(fd, path)

    def landing(self, path: str) -> str | None:
        """Where ``path`` is, or would be if the missing directories on the way were made.

        Args:
            path: absolute inside the image.

        Returns:
            A path without links; None if a file or a link that leads nowhere is in the way.
        """
        names = components(path)
        for known in range(len(names), -1, -1):
            here = self.real_path("/" + "/".join(names[:known]))
            if here is None:
                continue
            if known == len(names):
                return here
            found = self.stat(here)
            if found is None or not stat.S_ISDIR(found.st_mode):
                return None
            if self.stat(f"{here}/{names[known]}", follow=False) is not None:
                return None
            return "/".join(["" if here == "/" else here, *names[known:]])
        return None

    def names(self, path: str, limit: int = _MOST_NAMES) -> tuple[str, ...] | None:
        """The names in the directory at ``path``, sorted.

        Args:
            path: absolute inside the image.
            limit: the most names an honest directory of this kind has.

        Returns:
            The names; None if there is no directory.

        Raises:
            FileTooLarge: there are more than ``limit``.
        """
        with self._looking(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK) as fd:
            if fd is None:
                return None
            with os.scandir(fd) as entries:
                names = [entry.name for entry in islice(entries, limit + 1)]
        if len(names) > limit:
            raise FileTooLarge(f"the names in {path} of the image", found=f"more than {limit}")
        return tuple(sorted(names))

    def open_file(self, path: str) -> int | None:
        """Opens the regular file at ``path`` for reading.

        Args:
            path: absolute inside the image; links in it are followed inside the image.

        Returns:
            A descriptor that the caller closes; None if nothing is there.

        Raises:
            NotARegularFile: something else is there; it was not opened.
        """
        with self._looking(path, os.O_PATH) as location:
            if location is None:
                return None
            mode = os.fstat(location).st_mode
            if not stat.S_ISREG(mode):
                raise NotARegularFile(
                    f"the file {path} of the image", found=f"a {_KIND[stat.S_IFMT(mode)]}"
                )
            # The descriptor's own link in our procfs: the very inode that was just looked at.
            return os.open(
                f"/proc/self/fd/{location}",
                os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC,
            )

    def read_file(self, path: str, limit: int = LONGEST_FILE) -> bytes | None:
        """The content of the regular file at ``path``.

        Args:
            path: absolute inside the image; links in it are followed inside the image.
            limit: the most bytes an honest file of this kind has.

        Returns:
            The content; None if nothing is there.

        Raises:
            NotARegularFile: a directory, FIFO, socket or device is there.
            FileTooLarge: it is longer than ``limit``.
        """
        fd = self.open_file(path)
        if fd is None:
            return None
        try:
            # The size decides before a byte is read, the read decides if the file grows.
            length = os.fstat(fd).st_size
            content = b"" if length > limit else _read_up_to(fd, limit + 1)
        except OSError as error:
            raise _meaning(f"to read {path} of the image", error) from error
        finally:
            os.close(fd)
        if max(length, len(content)) > limit:
            raise FileTooLarge(f"the file {path} of the image", found=f"more than {limit} bytes")
        return content

    # Writing

    def make_directories(self, path: str) -> tuple[str, ...]:
        """Makes the directory ``path`` and those above it that are missing.

        Args:
            path: absolute inside the image.

        Returns:
            The directories that were made, the topmost first.

        Raises:
            RootfsError: one cannot be made; those above it stay.
        """
        names = components(path)
        missing: list[str] = []
        while True:
            here = "/" + "/".join(names)
            with self._looking(here, os.O_PATH | os.O_DIRECTORY) as fd:
                if fd is not None:
                    break
            if not names:
                raise PathRefused(f"the directory {path} in the image", found="no root")
            missing.append(names.pop())
        made: list[str] = []
        while missing:
            name = missing.pop()
            here = f"{here.rstrip('/')}/{name}"
            with self._writing(f"to make the directory {here} in the image", here) as (parent, _):
                # EEXIST is a file or a link that leads nowhere, and then it is in the way.
                os.mkdir(name, 0o755, dir_fd=parent)
                made.append(here)
                _adopt_directory(parent, name)
        return tuple(made)

    def write_file(self, path: str, data: bytes, *, like: os.stat_result | None = None) -> None:
        """Puts a file at ``path``, whole or not at all, in place of a file or link there.

        Args:
            path: absolute inside the image; its directory exists. A link at ``path`` is
                replaced, not followed.
            data: the content.
            like: whose mode, owner and time of change the file gets; without it, mode and
                owner of the file it replaces, or 0644 and the owner of the directory.

        Raises:
            DirectoryInTheWay: a directory is at ``path``.
            RootfsError: it cannot be written; what was there is untouched.
        """
        with self._writing(f"to write {path} in the image", path) as (parent, name):
            model = like or _lstat(parent, name)
            if model is not None and not stat.S_ISREG(model.st_mode):
                model = None
            with _temporary(parent, name) as temporary:
                fd = os.open(
                    temporary,
                    os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                    0o600,
                    dir_fd=parent,
                )
                try:
                    _write_all(fd, data)
                    owner = model or os.fstat(parent)
                    os.fchown(fd, owner.st_uid, owner.st_gid)
                    # Not the set-user-id bits: they vouched for another content.
                    os.fchmod(fd, model.st_mode & 0o777 if model else 0o644)
                    if like is not None:
                        os.utime(fd, ns=(like.st_atime_ns, like.st_mtime_ns))
                finally:
                    os.close(fd)

    def symlink(self, path: str, target: str) -> None:
        """Puts a link at ``path``, in place of a file or link there.

        Args:
            path: absolute inside the image; its directory exists.
            target: what the link says; it is not looked at.

        Raises:
            DirectoryInTheWay: a directory is at ``path``.
            RootfsError: it cannot be made; what was there is untouched.
        """
        with (
            self._writing(f"to link {path} in the image", path) as (parent, name),
            _temporary(parent, name) as temporary,
        ):
            os.symlink(target, temporary, dir_fd=parent)
            owner = os.fstat(parent)
            if owner.st_uid or owner.st_gid:
                os.chown(
                    temporary, owner.st_uid, owner.st_gid, dir_fd=parent, follow_symlinks=False
                )

    def rename(self, path: str, name: str) -> None:
        """Gives what is at ``path`` another ``name`` in the same directory.

        Args:
            path: absolute inside the image; a link is renamed, not followed.
            name: a single name. What has it already is replaced, unless it is a directory.

        Raises:
            RootfsError: it cannot be renamed.
        """
        with self._writing(f"to rename {path} in the image", path) as (parent, old):
            if "/" in name or name in {"", ".", ".."}:
                raise PathRefused(f"the name {name!r} in the image", found="not a single name")
            os.rename(old, name, src_dir_fd=parent, dst_dir_fd=parent)

    def remove(self, path: str) -> None:
        """Removes the file, link, FIFO, socket or device at ``path``, if there is one."""
        with self._writing(f"to remove {path} from the image", path) as (parent, name):
            try:
                os.unlink(name, dir_fd=parent)
            except FileNotFoundError:
                return

    def remove_directory(self, path: str) -> None:
        """Removes the empty directory at ``path``."""
        with self._writing(f"to remove {path} from the image", path) as (parent, name):
            os.rmdir(name, dir_fd=parent)

    # How

    @contextmanager
    def _looking(self, path: str, flags: int) -> Iterator[int | None]:
        """A descriptor of what ``path`` leads to, for the time of a with-block, or None."""
        inside = "/".join(components(path))
        fd = None
        try:
            fd = open_in_root(self._fd, inside, flags)
        except OSError as error:
            if error.errno not in _NOTHING_THERE:
                raise _meaning(f"to look at {path} in the image", error) from error
        try:
            yield fd
        finally:
            if fd is not None:
                os.close(fd)

    @contextmanager
    def _writing(self, asked: str, path: str) -> Iterator[tuple[int, str]]:
        """The directory that holds ``path``, and its name in there, for one change."""
        names = components(path)
        if not names:
            raise PathRefused(asked, found="the root itself")
        try:
            parent = open_in_root(self._fd, "/".join(names[:-1]), os.O_PATH | os.O_DIRECTORY)
        except OSError as error:
            raise _meaning(asked, error) from error
        try:
            yield parent, names[-1]
        except OSError as error:
            raise _meaning(asked, error) from error
        finally:
            os.close(parent)

    def _place_of(self, fd: int, path: str) -> str:
        """The path of ``fd`` below the root, as the kernel has it."""
        root = os.readlink(f"/proc/self/fd/{self._fd}").rstrip("/")
        real = os.readlink(f"/proc/self/fd/{fd}")
        if real == root or not root:
            return real if not root else "/"
        if not real.startswith(root + "/"):
            # Never seen; would mean that the tree was moved while we looked.
            raise RootfsBusy(f"to find {path} in the image", found="it moved out of the root")
        return real[len(root) :]


_KIND: Final = {
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
    stat.S_IFLNK: "symbolic link",
}


def _meaning(asked: str, error: OSError) -> RootfsError:
    """The error of ours that ``error`` is, when it happens to an image."""
    kind, found, do = _MEANING.get(error.errno or 0, (RootfsIo, str(error.strerror), ""))
    return kind(asked, found=found, do=do)


def _lstat(parent: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


@contextmanager
def _temporary(parent: int, name: str) -> Iterator[str]:
    """A name beside ``name`` to make something under; it takes that place at the end."""
    temporary = f".nvshim-{os.urandom(8).hex()}"
    try:
        yield temporary
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        with suppress(FileNotFoundError):  # it may never have been made
            os.unlink(temporary, dir_fd=parent)
        raise


def _adopt_directory(parent: int, name: str) -> None:
    """Gives a directory that was just made the owner of its parent, and mode 0755."""
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        owner = os.fstat(parent)
        if owner.st_uid or owner.st_gid:
            os.fchown(fd, owner.st_uid, owner.st_gid)
        os.fchmod(fd, 0o755)  # whatever the umask
    finally:
        os.close(fd)


def _read_up_to(fd: int, limit: int) -> bytes:
    parts = []
    while limit > 0 and (part := os.read(fd, min(limit, LONGEST_FILE))):
        parts.append(part)
        limit -= len(part)
    return b"".join(parts)


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
