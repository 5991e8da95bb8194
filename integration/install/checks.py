"""Check that trees can be installed below a prefix, before anything is written."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from integration.install.errors import (
    LinkTaken,
    NoSpace,
    NotRoot,
    PlaceNotExecutable,
    PlaceReadOnly,
    PlaceUnsafe,
    SourceBroken,
)
from integration.install.survey import Survey
from integration.install_layout import InstallLayout
from integration.tree import ARCHITECTURES, Tree

# Separators in the library path that the tree's loader gets, see shim/forkserver/tree.c.
_MISREAD = frozenset(":;$")

# The kernel's limit.
_MOST_LINKS = 40


def check_root() -> None:
    """Check that this process runs as root.

    Raises:
        NotRoot: it runs as another user.
    """
    if os.geteuid() != 0:
        raise NotRoot(
            "to change what is installed",
            found=f"running as user {os.geteuid()}",
            do="run it as root, or with --dry-run",
        )


def check_place(layout: InstallLayout) -> None:
    """Check that only root controls the prefix, and that programs can run from it.

    Raises:
        PlaceUnsafe: the prefix or a directory above it belongs to another user or is writable by
            others.
        PlaceReadOnly: the file system is mounted read-only.
        PlaceNotExecutable: the file system is mounted noexec.
    """
    misread = sorted(_MISREAD.intersection(layout.prefix))
    if misread:
        raise PlaceUnsafe(
            f"to install below {layout.prefix}",
            found=f"the path contains {' '.join(misread)}, which the dynamic loader misreads",
            do="choose another --prefix",
        )
    prefix = _existing(layout.prefix)
    check_owners(layout.prefix)
    if taken := _blocking_path(layout.prefix):
        raise PlaceUnsafe(
            f"to install below {layout.prefix}",
            found=f"{taken} is a link to nothing",
            do="choose another --prefix",
        )
    flags = os.statvfs(prefix).f_flag
    if flags & os.ST_RDONLY:
        raise PlaceReadOnly(
            f"to install below {layout.prefix}",
            found="the file system is mounted read-only",
            do="choose another --prefix",
        )
    if flags & os.ST_NOEXEC:
        raise PlaceNotExecutable(
            f"to install below {layout.prefix}",
            found="the file system is mounted noexec",
            do="choose another --prefix, or mount it with exec",
        )


def check_links(survey: Survey) -> None:
    """Check that the links can be created without replacing anything that is not ours.

    Raises:
        LinkTaken: the path holds another file, or a link to somewhere else.
        PlaceReadOnly: the links' directory is not writable.
    """
    for link in survey.links:
        if not link.ours:
            raise LinkTaken(
                f"to create the link {link.path}",
                found=f"it is a link to {link.target}" if link.target else "another file is there",
                do="remove it, or choose another --bindir",
            )
    bindir = survey.layout.bindir
    if all(link.is_right for link in survey.links):
        return
    if taken := _blocking_path(bindir):
        raise LinkTaken(
            f"to create links in {bindir}",
            found=f"{taken} is not a directory",
            do="choose another --bindir",
        )
    if os.statvfs(_existing(bindir)).f_flag & os.ST_RDONLY:
        raise PlaceReadOnly(
            f"to create links in {bindir}",
            found="the file system is mounted read-only",
            do="choose a --bindir on containerd's PATH, or use --no-links and"
            " nvshim configure … --shim PATH",
        )


def check_machine(tree: Tree) -> None:
    """Check that a tree was built for this machine's architecture.

    Raises:
        SourceBroken: it was built for another one.
    """
    machine = os.uname().machine
    here = ARCHITECTURES.get(machine, machine)
    if tree.architecture != here:
        raise SourceBroken(
            f"to install {tree.name}",
            found=f"it is for {tree.architecture}, and this machine is {here}",
            do=f"get the {here} build",
        )


def check_space(layout: InstallLayout, needed: int) -> None:
    """Check that there is room for a tree.

    Args:
        layout: the installation's directories.
        needed: the required space in bytes.

    Raises:
        NoSpace: there is not enough room.
    """
    status = os.statvfs(_existing(layout.prefix))
    free = status.f_bavail * status.f_frsize
    if free < needed:
        raise NoSpace(
            f"to reserve {needed >> 20} MiB below {layout.prefix}",
            found=f"only {free >> 20} MiB are free",
            do="make room, or choose another --prefix",
        )


def check_owners(path: str) -> None:
    """Check that only root controls where a path leads.

    Args:
        path: an absolute path; it need not exist.

    Raises:
        PlaceUnsafe: a directory or link on the way belongs to another user, or others may change
            it.
    """
    for found, status in _path_components(path):
        _check_owner(found, status)


def _existing(path: str) -> str:
    """Return a path, or the nearest directory above it that exists."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def _blocking_path(path: str) -> str:
    """Return what prevents a directory from being created; empty if nothing does."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return "" if os.path.isdir(path) else path


def _path_components(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every existing directory and link that a path passes through."""
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
            return  # we will create it, or the component before is not a directory
        except OSError as error:  # for example, a name is too long
            raise PlaceUnsafe(
                f"to follow {path}",
                found=os.strerror(error.errno or 0).lower(),
                do="choose another path",
            ) from error
        yield found, status
        if not stat.S_ISLNK(status.st_mode):
            here = found
            continue
        links += 1
        if links > _MOST_LINKS:
            raise PlaceUnsafe(
                f"to follow {path}",
                found=f"more than {_MOST_LINKS} links",
                do="choose another path",
            )
        target = os.readlink(found)
        here = "/" if target.startswith("/") else here
        left += reversed(target.split("/"))


def _check_owner(path: str, status: os.stat_result) -> None:
    asked = f"to install below {path}"
    is_link = stat.S_ISLNK(status.st_mode)
    if not is_link and not stat.S_ISDIR(status.st_mode):
        raise PlaceUnsafe(asked, found="it is not a directory", do="choose another path")
    if status.st_uid not in {0, os.geteuid()}:
        raise PlaceUnsafe(
            asked,
            found=f"it belongs to user {status.st_uid}",
            do="give it to root (chown), or choose another path",
        )
    if is_link:
        return  # its directory was checked
    # In a sticky directory others can replace only their own files.
    others = stat.S_IWOTH | (stat.S_IWGRP if status.st_gid else 0)
    if status.st_mode & others and not status.st_mode & stat.S_ISVTX:
        raise PlaceUnsafe(
            asked,
            found="others may write to it",
            do=f"run `chmod go-w {path}`, or choose another path",
        )
