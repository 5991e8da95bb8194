"""The only object that reads or writes an image.

An image is hostile: any component of any path may be a link to anywhere, and any file may be a FIFO
that blocks, a device that acts when opened, or a sparse file of five gigabytes. A process that
shares the tree may exchange any of these at any time.

Rules
- The root is a directory descriptor. This module has no path of it, so that nothing can be joined
  to one.
- A path of several components is resolved by one openat2(2) call that cannot leave the root
  (:mod:`hooks.image.openat2`). Its result is a descriptor, and only the descriptor is used.
- A :class:`hooks.image.directory.Directory` changes only single names.

Reading returns None where a program in the container would also find nothing: for a missing path,
and for a dangling or cyclic link. Paths are absolute inside the image, without ".."; links in them
are followed inside the image.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Self

from hooks.image.directory import (
    LONGEST_FILE,
    MOST_NAMES,
    Directory,
    list_names,
    meaning,
    open_regular,
    read_all,
)
from hooks.image.openat2 import open_in_root
from hooks.image.rootfs_errors import KernelTooOld, PathRefused, RootfsBusy, RootfsUnavailable

DEEPEST: Final = 64
"""The most components of a path to look up in an image."""

_NOTHING_THERE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""The kernel's errors for a path that leads nowhere; ELOOP is for cycles and magic links."""

_MOST_LINKS: Final = 40
"""The most links to follow in a path, as in the kernel."""


def components(path: str) -> list[str]:
    """Return the components of ``path``, without empty ones and ".".

    Args:
        path: an absolute path inside the image.

    Raises:
        PathRefused: ``path`` is relative, absurdly deep, or contains ".." or a NUL.
    """
    names = [name for name in path.split("/") if name and name != "."]
    plain = path[:1] == "/" and path.isascii() and ".." not in path and "\0" not in path
    if plain and len(names) <= DEEPEST:
        return names  # nearly every path; others need more checks
    if (
        not path.startswith("/")
        or ".." in names
        or len(names) > DEEPEST
        or "\0" in path
        or not _is_encodable(path)
    ):
        raise PathRefused(
            f"the path {path!r} in the image",
            found="it is relative, too deep, or has '..' or a character in it that no name has",
            do="use a plain absolute path",
        )
    return names


def _is_encodable(path: str) -> bool:
    """Whether the kernel accepts ``path``: JSON can have strings that it does not."""
    if path.isascii():
        return True
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def _is_text(path: str) -> bool:
    """Whether a path from the kernel is UTF-8, like JSON and loaders' files."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


class Rootfs:
    """A root file system, held as a directory descriptor.

    A context manager: leaving it closes the descriptor.

    Args:
        fd: a directory descriptor (O_PATH suffices), now owned by this object.
    """

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def open(cls, path: str) -> Self:
        """Open the rootfs at ``path``, a directory of the host that we created or mounted.

        Args:
            path: a path on the host that no image or container can influence.

        Raises:
            RootfsUnavailable: ``path`` cannot be opened as a directory.
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
        """Close the descriptor; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Looking

    def is_writable(self) -> bool:
        """Whether the file system and its mount are writable; found out without writing."""
        return not os.fstatvfs(self._fd).f_flag & os.ST_RDONLY

    def stat(self, path: str, *, follow: bool = True) -> os.stat_result | None:
        """Return the status of ``path``; without ``follow``, that of a link itself."""
        fd = self._open(path, os.O_PATH | (0 if follow else os.O_NOFOLLOW))
        if fd is None:
            return None
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def read_link(self, path: str) -> str | None:
        """Return the target of the link at ``path``, unchanged; None if there is no link."""
        with self._looking(path, os.O_PATH | os.O_NOFOLLOW) as fd:
            if fd is None or not stat.S_ISLNK(os.fstat(fd).st_mode):
                return None
            return os.readlink("", dir_fd=fd)

    def real_path(self, path: str) -> str | None:
        """Return the absolute path of ``path`` inside the image after following all links.

        Returns:
            The path; None also if it is not UTF-8, because no spec can name it.
        """
        with self._looking(path, os.O_PATH) as fd:
            place = None if fd is None else self._place_of(fd, path)
        return place if place is not None and _is_text(place) else None

    def landing(self, path: str, known: dict[str, str | None] | None = None) -> str | None:
        """Return where ``path`` is, or would be after creating the missing directories on the way.

        Targets of links count, too: "/a/b" for "/link/b" if "/link" leads to a missing "/a".

        Args:
            known: a cache of results by path, used and extended, since many paths share
                directories.

        Returns:
            A path without links; None if a file or a cycle of links is in the way.
        """
        known = {} if known is None else known
        return self._landing(components(path), known, _MOST_LINKS)

    def _landing(self, names: list[str], known: dict[str, str | None], links: int) -> str | None:
        path = "/" + "/".join(names)
        if path not in known:
            known[path] = None  # for a link that leads to itself
            here = self.real_path(path)
            if here is None and names:
                above = self._landing(names[:-1], known, links)
                if above is not None:
                    here = self._missing(above, names[-1], known, links)
            known[path] = here
        return known[path]

    def _missing(
        self, above: str, name: str, known: dict[str, str | None], links: int
    ) -> str | None:
        """Return where this name would be, in a directory that may also be missing."""
        missing = f"{above.rstrip('/')}/{name}"
        if missing.count("/") > DEEPEST:
            return None
        directory = self.stat(above)
        if directory is None:
            return missing
        found = self.stat(missing, follow=False)
        if found is None:
            return missing if stat.S_ISDIR(directory.st_mode) else None
        target = self.read_link(missing)
        return None if target is None else self._behind(above, target, known, links - 1)

    def _behind(
        self, place: str, target: str, known: dict[str, str | None], links: int
    ) -> str | None:
        """Return where a link in the directory ``place`` leads if part of its target is missing."""
        names = [name for name in target.split("/") if name and name != "."]
        if links < 0 or len(names) > DEEPEST or not _is_text(target):
            return None
        if target.startswith("/"):
            place = "/"
        for name in names:
            above = components(place)
            if name != "..":
                deeper = self._landing([*above, name], known, links)
            else:
                # ".." after a missing directory: runtimes differ in where that leads.
                deeper = "/" + "/".join(above[:-1]) if self._is_directory(place) else None
            if deeper is None or deeper.count("/") >= DEEPEST:
                return None
            place = deeper
        return place

    def _is_directory(self, path: str) -> bool:
        found = self.stat(path)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def names(self, path: str, limit: int = MOST_NAMES) -> tuple[str, ...] | None:
        """Return the names in the directory at ``path``, sorted; None if there is no directory.

        Raises:
            FileTooLarge: there are more than ``limit`` names.
        """
        asked = f"to list {path} in the image"
        with self._looking(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK) as fd:
            return None if fd is None else list_names(fd, limit, asked)

    def open_file(self, path: str) -> int | None:
        """Open the regular file at ``path``; the caller closes the descriptor. None without one.

        Raises:
            NotARegularFile: something else is there, and was not opened.
        """
        with self._looking(path, os.O_PATH) as fd:
            return None if fd is None else open_regular(fd, f"to read {path} in the image")

    def read_file(self, path: str, limit: int = LONGEST_FILE) -> bytes | None:
        """Return the content of the regular file at ``path``; None if nothing is there.

        Raises:
            NotARegularFile: a directory, FIFO, socket or device is there.
            FileTooLarge: it is longer than ``limit`` bytes.
        """
        asked = f"to read {path} in the image"
        with self._looking(path, os.O_PATH) as fd:
            return None if fd is None else read_all(open_regular(fd, asked), limit, asked)

    # Changing

    def directory(self, path: str) -> Directory | None:
        """Open the directory at ``path`` for changes; the caller closes it. None without one."""
        fd = self._open(path, os.O_PATH | os.O_DIRECTORY)
        return None if fd is None else Directory(fd, path)

    # How

    @contextmanager
    def _looking(self, path: str, flags: int) -> Iterator[int | None]:
        """Yield a descriptor of what ``path`` leads to, or None, and close it."""
        fd = self._open(path, flags)
        try:
            yield fd
        except OSError as error:
            raise meaning(f"to look at {path} in the image", error) from error
        finally:
            if fd is not None:
                os.close(fd)

    def _open(self, path: str, flags: int) -> int | None:
        """Return a descriptor of what ``path`` leads to, or None."""
        try:
            return open_in_root(self._fd, "/".join(components(path)), flags)
        except OSError as error:
            if error.errno in _NOTHING_THERE:
                return None
            raise meaning(f"to look at {path} in the image", error) from error

    def _place_of(self, fd: int, path: str) -> str:
        """Return the path of ``fd`` below the root, as the kernel reports it."""
        root = os.readlink(f"/proc/self/fd/{self._fd}").rstrip("/")
        real = os.readlink(f"/proc/self/fd/{fd}")
        if real == root or not root:
            return real if not root else "/"
        if not real.startswith(root + "/"):
            # Never seen: the tree would have moved meanwhile.
            raise RootfsBusy(f"to find {path} in the image", found="it moved out of the root")
        return real[len(root) :]
