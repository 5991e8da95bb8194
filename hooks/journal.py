"""Changes to an image that can be taken back.

A container whose creation fails must leave its image as it found it. So each change goes
through a journal, which makes it through the :class:`Rootfs` and notes beforehand how to undo
it. What a change replaces is kept in the cheapest way that restores it:

====================================  =============================================
what is replaced                      how it is kept
====================================  =============================================
nothing                               undo removes
a link                                its target
a regular file of at most 1 MiB       its content, mode, owner and time, in memory
a larger file, FIFO, socket, device   under another name beside it, until the end
a directory with names in it          not replaced: ``DirectoryInTheWay``
a file of more than 64 MiB            not replaced: ``FileTooLarge``
====================================  =============================================

(Renaming would restore all of them, but on overlayfs it first copies the file up and syncs
it: milliseconds for a cache, and for five sparse gigabytes a full disk.)

A change that would change nothing is not made, so the same container created twice costs no
second write, and nothing piles up.
"""

from __future__ import annotations

import os
import stat
from functools import partial
from typing import TYPE_CHECKING, Final

from hooks.errors import RootfsError
from hooks.rootfs import LONGEST_FILE
from hooks.rootfs_errors import DirectoryInTheWay, FileTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable

    from hooks.rootfs import Rootfs

__all__ = ["Journal"]

_LARGEST_REPLACED: Final = 64 << 20


class Journal:
    """The changes one call makes, in order.

    Args:
        rootfs: what they are made to.

    Attributes:
        written: the paths that were made or changed, in order.
    """

    __slots__ = ("_aside", "_rootfs", "_undo", "written")

    def __init__(self, rootfs: Rootfs) -> None:
        self._rootfs = rootfs
        self._undo: list[Callable[[], None]] = []
        self._aside: list[str] = []
        self.written: list[str] = []

    def directory(self, path: str) -> None:
        """Makes sure that ``path`` is a directory, or a link to one."""
        # One level at a time, so that a failure half way leaves nothing unnoted.
        missing: list[str] = []
        while (found := self._rootfs.stat(path)) is None or not stat.S_ISDIR(found.st_mode):
            missing.append(path)
            path = os.path.dirname(path.rstrip("/")) or "/"
        for here in reversed(missing):
            for made in self._rootfs.make_directories(here):
                self._note(made, partial(self._rootfs.remove_directory, made))

    def file(self, path: str, data: bytes) -> None:
        """Makes sure that ``path`` is a regular file with the content ``data``."""
        found = self._rootfs.stat(path, follow=False)
        if (
            found is not None
            and stat.S_ISREG(found.st_mode)
            and found.st_size == len(data) <= LONGEST_FILE
            and self._rootfs.read_file(path) == data
        ):
            return
        self._replace(path, found)
        self._rootfs.write_file(path, data)

    def mount_point(self, path: str) -> None:
        """Makes sure that ``path`` is a regular file, of any content, and not a link to one.

        A runtime that finds a link there would mount over what it leads to.
        """
        found = self._rootfs.stat(path, follow=False)
        if found is not None and stat.S_ISREG(found.st_mode):
            return
        if found is not None and stat.S_ISDIR(found.st_mode) and not self._rootfs.names(path):
            # What a bind mount of a missing file once left behind.
            self._rootfs.remove_directory(path)
            self._note(path, partial(self._remake, path))
            found = None
        self._replace(path, found)
        self._rootfs.write_file(path, b"")

    def link(self, path: str, target: str) -> None:
        """Makes sure that ``path`` is a link that says ``target``."""
        found = self._rootfs.stat(path, follow=False)
        if (
            found is not None
            and stat.S_ISLNK(found.st_mode)
            and self._rootfs.read_link(path) == target
        ):
            return
        self._replace(path, found)
        self._rootfs.symlink(path, target)

    def settle(self) -> None:
        """Ends it: everything stays, and what was kept under another name goes."""
        self._undo.clear()
        while self._aside:
            self._rootfs.remove(self._aside.pop())

    def undo(self) -> None:
        """Takes everything back, the last change first.

        A step that fails does not keep the others from being taken back: the error that led
        here is the one worth telling.
        """
        while self._undo:
            step = self._undo.pop()
            try:
                step()
            except RootfsError:
                continue
        self._aside.clear()
        self.written.clear()

    def _note(self, path: str, undo: Callable[[], None]) -> None:
        self.written.append(path)
        self._undo.append(undo)

    def _remake(self, path: str) -> None:
        self._rootfs.make_directories(path)

    def _replace(self, path: str, found: os.stat_result | None) -> None:
        """Notes how to bring back what is at ``path``, of which ``found`` is the lstat."""
        rootfs = self._rootfs
        if found is None:
            self.directory(os.path.dirname(path))
            self._note(path, partial(rootfs.remove, path))
            return
        kind = stat.S_IFMT(found.st_mode)
        if kind == stat.S_IFDIR:
            raise DirectoryInTheWay(
                f"to put a file or link at {path} in the image",
                found="a directory",
                do="remove it from the image",
            )
        if kind == stat.S_IFLNK:
            target = rootfs.read_link(path) or ""
            self._note(path, partial(rootfs.symlink, path, target))
        elif kind == stat.S_IFREG and found.st_size <= LONGEST_FILE:
            content = rootfs.read_file(path) or b""
            self._note(path, partial(rootfs.write_file, path, content, like=found))
        elif kind == stat.S_IFREG and found.st_size > _LARGEST_REPLACED:
            raise FileTooLarge(
                f"to replace {path} in the image", found=f"a file of {found.st_size} bytes"
            )
        else:
            aside = f".nvshim-{os.urandom(8).hex()}"
            directory, name = os.path.split(path)
            rootfs.rename(path, aside)
            self._aside.append(f"{directory}/{aside}")
            self._note(path, partial(rootfs.rename, f"{directory}/{aside}", name))
