"""Change an image so that all changes can be undone.

A failed creation of a container must leave its image as it was. So each change goes through a
journal, which records how to undo it. Replaced entries are kept in the cheapest restorable way:

====================================  =============================================
what is replaced                      how it is kept
====================================  =============================================
nothing                               undo removes
a link                                its target
a regular file of at most 1 MiB       its content, mode, owner and times, in memory
a larger file, FIFO, socket, device   under another name next to it, until the end
an empty directory, by a mount point  undo creates it again
a directory                           not replaced: ``DirectoryInTheWay``
a file of more than 64 MiB            not replaced: ``FileTooLarge``; the caller of a link can
                                      mount over it
====================================  =============================================

(Renaming would work for all of them. But on overlayfs it first copies the file up and syncs it.
That takes milliseconds for a cache, and fills the disk for a sparse file of five gigabytes.)

A change without effect is skipped: creating the same container twice writes once. Directories stay
open until the end, so that a change and its undoing use the same directory, even if the paths
change in the meantime.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Self

from hooks.errors import RootfsError
from hooks.image.directory import LONGEST_FILE, Directory
from hooks.image.rootfs import Rootfs, components
from hooks.image.rootfs_errors import DirectoryInTheWay, FileTooLarge, PathRefused, RootfsBusy

_LARGEST_REPLACED: Final = 64 << 20


class Journal:
    """The changes in one with-block; if it fails, all are undone.

    Attributes:
        written: the paths that were created or changed, in order.
    """

    __slots__ = ("_directories", "_rootfs", "_settle", "_undo", "written")

    def __init__(self, rootfs: Rootfs) -> None:
        self._rootfs = rootfs
        self._directories: dict[str, Directory] = {}
        self._undo: list[Callable[[], object]] = []
        self._settle: list[Callable[[], object]] = []
        self.written: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # After a failed step, take the other steps nevertheless. If the block has failed, report
        # its own error. Otherwise the failed step only leaves a file with a temporary name.
        _take(self._settle if kind is None else reversed(self._undo))
        for directory in self._directories.values():
            directory.close()

    def directory(self, path: str) -> None:
        """Make sure that ``path`` is a directory, or a link to one."""
        self._open("/" + "/".join(components(path)))

    def directory_itself(self, path: str) -> None:
        """Make sure that ``path`` is a directory or missing; replace a link by a directory."""
        directory, name = self._parent(path)
        found = directory.stat(name)
        if found is None or stat.S_ISDIR(found.st_mode):
            return
        self._replace(directory, name, found, path)
        directory.remove(name)
        self._undo.append(partial(directory.remove_directory, name))
        directory.make_directory(name).close()

    def file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Make sure that ``path`` is a regular file with the content ``data``.

        An existing file keeps its mode.
        """
        directory, name = self._parent(path)
        found = directory.stat(name)
        if (
            found is not None
            and stat.S_ISREG(found.st_mode)
            and found.st_size == len(data)
            and directory.read_file(name, len(data)) == data
        ):
            return
        self._replace(directory, name, found, path)
        directory.write_file(name, data, mode=mode)

    def mount_point(self, path: str, *, fresh: bool = False) -> None:
        """Make sure that ``path`` is a regular file, of any content, and not a link to one.

        A runtime would mount over the target of a link.

        Args:
            fresh: whether to replace an existing file with an empty one. A failure does not restore
                it, so this is only for a layer, which is then removed.
        """
        directory, name = self._parent(path)
        if fresh:
            found = directory.stat(name)
            if found is not None and stat.S_ISREG(found.st_mode):
                directory.remove(name)
        if directory.create_empty(name):
            self._note(path, partial(directory.remove, name))
            return
        found = directory.stat(name)
        if found is None:
            raise RootfsBusy(
                f"to make {path} in the image", found="a process that makes and removes it"
            )
        if stat.S_ISDIR(found.st_mode) and not directory.names(name):
            # Bind mounts of missing files leave an empty directory.
            directory.remove_directory(name)
            self._note(path, lambda: directory.make_directory(name).close())
            self.mount_point(path)
        elif not stat.S_ISREG(found.st_mode):
            self._replace(directory, name, found, path)
            directory.write_file(name, b"")

    def link(self, path: str, target: str) -> None:
        """Make sure that ``path`` is a link to ``target``."""
        directory, name = self._parent(path)
        if directory.create_link(name, target):
            self._note(path, partial(directory.remove, name))
            return
        found = directory.stat(name)
        if (
            found is not None
            and stat.S_ISLNK(found.st_mode)
            and directory.read_link(name) == target
        ):
            return
        self._replace(directory, name, found, path)
        directory.make_link(name, target)

    def _parent(self, path: str) -> tuple[Directory, str]:
        """Return the directory of ``path``, created if missing, and the name in it."""
        above, _, name = path.rpartition("/")
        directory = self._directories.get(above)
        if directory is not None and name not in {"", ".", ".."}:
            return directory, name  # as for nearly every path, since paths share directories
        names = components(path)
        if not names:
            raise PathRefused(f"to put something at {path} in the image", found="the root itself")
        return self._open("/" + "/".join(names[:-1])), names[-1]

    def _open(self, path: str) -> Directory:
        """Return the directory at ``path``, created if missing; it stays open until the end."""
        directory = self._directories.get(path)
        if directory is None:
            directory = self._rootfs.directory(path)
            if directory is None:
                directory = self._make(path)
            self._directories[path] = directory
        return directory

    def _make(self, path: str) -> Directory:
        """Create a missing directory; if its name is a link, at the link's target."""
        above, _, name = path.rpartition("/")
        parent = self._open(above or "/")
        try:
            directory = parent.make_directory(name)
        except DirectoryInTheWay:
            place = self._rootfs.landing(path)
            if place in {None, path}:
                raise  # it is not a directory
            return self._open(place)
        self._note(path, partial(parent.remove_directory, name))
        return directory

    def _note(self, path: str, undo: Callable[[], object]) -> None:
        self.written.append(path)
        self._undo.append(undo)

    def _replace(
        self, directory: Directory, name: str, found: os.stat_result | None, path: str
    ) -> None:
        """Record how to restore the file of this name; ``found`` is its lstat."""
        if found is None:
            self._note(path, partial(directory.remove, name))
            return
        kind = stat.S_IFMT(found.st_mode)
        if kind == stat.S_IFDIR:
            raise DirectoryInTheWay(
                f"to put a file or link at {path} in the image",
                found="a directory",
                do="remove it from the image",
            )
        if kind == stat.S_IFLNK:
            target = directory.read_link(name)
            self._note(path, partial(directory.make_link, name, target))
        elif kind == stat.S_IFREG and found.st_size <= LONGEST_FILE:
            content = directory.read_file(name)
            self._note(path, partial(directory.write_file, name, content, like=found))
        elif kind == stat.S_IFREG and found.st_size > _LARGEST_REPLACED:
            raise FileTooLarge(
                f"to replace {path} in the image", found=f"a file of {found.st_size} bytes"
            )
        else:
            aside = f".nvshim-{os.urandom(8).hex()}"
            directory.rename(name, aside)
            self._note(path, partial(directory.rename, aside, name))
            self._settle.append(partial(directory.remove, aside))


def _take(steps: Iterable[Callable[[], object]]) -> None:
    """Take every step, even after one that failed."""
    for step in steps:
        try:
            step()
        except RootfsError:
            continue
