"""Whether a place is one to install to. All is asked before anything is written."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

from integration.install.errors import (
    LinkTaken,
    NoSpace,
    NotRoot,
    PlaceNotExecutable,
    PlaceReadOnly,
    PlaceUnsafe,
    SourceBroken,
)
from integration.install_layout import InstallLayout
from integration.tree import ARCHITECTURES, Tree

if TYPE_CHECKING:
    from integration.install.survey import Survey


# In the list of directories that the tree's loader is given, see shim/forkserver/tree.c.
_MISREAD = frozenset(":;$")

# As many as the kernel follows.
_MOST_LINKS = 40


def check_root() -> None:
    """See that this process is root's.

    Raises:
        NotRoot: it is not.
    """
    if os.geteuid() != 0:
        raise NotRoot(
            "to change what is installed",
            found=f"the user with number {os.geteuid()}",
            do="run it as root, or with --dry-run",
        )


def check_place(layout: InstallLayout) -> None:
    """See that nobody but root decides what will be at a place, and that it can be executed.

    Raises:
        PlaceUnsafe: a directory above, or the prefix, is another's, or can be written to by others.
        PlaceReadOnly: a file system is mounted read-only.
        PlaceNotExecutable: or so that nothing on it is executed.
    """
    misread = sorted(_MISREAD.intersection(layout.prefix))
    if misread:
        raise PlaceUnsafe(
            f"to install below {layout.prefix}",
            found=f"{' '.join(misread)} in it, which a program's loader takes for something else",
            do="choose another --prefix",
        )
    prefix = _existing(layout.prefix)
    check_owners(layout.prefix)
    if taken := _blocking_path(layout.prefix):
        raise PlaceUnsafe(
            f"to install below {layout.prefix}",
            found=f"{taken} leads to nothing",
            do="choose another --prefix",
        )
    flags = os.statvfs(prefix).f_flag
    if flags & os.ST_RDONLY:
        raise PlaceReadOnly(
            f"to install below {layout.prefix}",
            found="a file system that is mounted read-only",
            do="choose another --prefix",
        )
    if flags & os.ST_NOEXEC:
        raise PlaceNotExecutable(
            f"to install below {layout.prefix}",
            found="a file system that is mounted noexec",
            do="choose another --prefix, or mount it with exec",
        )


def check_links(survey: Survey) -> None:
    """See that the links can be made, and belong to nobody else.

    Raises:
        LinkTaken: there is somebody else's file, or a link to elsewhere.
        PlaceReadOnly: the directory of links cannot be written to.
    """
    for link in survey.links:
        if not link.ours:
            raise LinkTaken(
                f"the link {link.path}",
                found=f"a link to {link.target}" if link.target else "a file of somebody else's",
                do="remove it, or choose another --bindir",
            )
    bindir = survey.layout.bindir
    if all(link.is_right for link in survey.links):
        return
    if taken := _blocking_path(bindir):
        raise LinkTaken(
            f"links in {bindir}", found=f"{taken} is no directory", do="choose another --bindir"
        )
    if os.statvfs(_existing(bindir)).f_flag & os.ST_RDONLY:
        raise PlaceReadOnly(
            f"links in {bindir}",
            found="a file system that is mounted read-only",
            do="choose a --bindir on containerd's PATH, or --no-links and"
            " nvshim configure … --shim PATH",
        )


def check_machine(tree: Tree) -> None:
    """See that a tree is for this machine.

    Raises:
        SourceBroken: it is for another one.
    """
    machine = os.uname().machine
    here = ARCHITECTURES.get(machine, machine)
    if tree.architecture != here:
        raise SourceBroken(
            f"to install {tree.name}",
            found=f"it is for {tree.architecture}, and this machine is {here}",
            do="have the one for this machine",
        )


def check_space(layout: InstallLayout, needed: int) -> None:
    """See that there is room for a tree.

    Args:
        place: where.
        needed: bytes.

    Raises:
        NoSpace: there is not.
    """
    status = os.statvfs(_existing(layout.prefix))
    free = status.f_bavail * status.f_frsize
    if free < needed:
        raise NoSpace(
            f"{needed >> 20} MiB below {layout.prefix}",
            found=f"{free >> 20} MiB",
            do="make room, or choose another --prefix",
        )


def check_owners(path: str) -> None:
    """See that nobody but root decides where a path leads.

    Args:
        path: absolute; it need not be there.

    Raises:
        PlaceUnsafe: a directory or a link on the way is another's, or can be changed by others.
    """
    for found, status in _path_components(path):
        _check_owner(found, status)


def _existing(path: str) -> str:
    """The nearest directory above a path, or the path, that is there."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def _blocking_path(path: str) -> str:
    """What keeps a directory from being made; empty if nothing does, or it is there."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return "" if os.path.isdir(path) else path


def _path_components(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Every directory and link that has a say in where a path leads, as far as they are there."""
    here, links = "/", 0
    left = [*reversed(path.split("/"))]
    while left:
        name = left.pop()
        if name == "..":
            here = os.path.dirname(here)
            continue
        found = os.path.normpath(os.path.join(here, name))
        try:
            status = os.lstat(found)
        except (FileNotFoundError, NotADirectoryError):
            return  # it will be ours, or the one before is no directory
        yield found, status
        if not stat.S_ISLNK(status.st_mode):
            here = found
            continue
        links += 1
        if links > _MOST_LINKS:
            raise PlaceUnsafe(
                f"to follow {path}", found=f"more than {_MOST_LINKS} links", do="choose another"
            )
        target = os.readlink(found)
        here = "/" if target.startswith("/") else here
        left += reversed(target.split("/"))


def _check_owner(path: str, status: os.stat_result) -> None:
    asked = f"a place that only root can change, {path}"
    is_link = stat.S_ISLNK(status.st_mode)
    if not is_link and not stat.S_ISDIR(status.st_mode):
        raise PlaceUnsafe(asked, found="no directory", do="choose another")
    if status.st_uid not in {0, os.geteuid()}:
        raise PlaceUnsafe(
            asked,
            found=f"it belongs to user {status.st_uid}",
            do="give it to root (chown), or choose another",
        )
    if is_link:
        return  # whose directory was looked at
    # In a sticky directory others can exchange only what is theirs.
    others = stat.S_IWOTH | (stat.S_IWGRP if status.st_gid else 0)
    if status.st_mode & others and not status.st_mode & stat.S_ISVTX:
        raise PlaceUnsafe(
            asked, found="others may write to it", do=f"run `chmod go-w {path}`, or choose another"
        )
