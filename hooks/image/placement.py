"""Write a plan's files into an image, before any process of the container exists.

:func:`place` creates, in this order:

- /dev as a directory, if devices are created in it: before runc 1.3.6 and crun 1.28, a runtime
  follows a link there out of the image (CVE-2026-41579, CVE-2026-47766);
- the mount points of the plan's mounts, so that the runtime need not create any, and finds no link
  there whose target it would mount over;
- the plan's links: sonames next to their libraries, and others;
- the files that the image's dynamic loaders read (:mod:`hooks.image.loader_files`);
- the plan's own files, and directories on which its directories of links are mounted.

All of this goes through a :class:`Journal`: the same plan again changes nothing, and a failure
undoes everything.

Rules
- A path that the container covers with a mount is not touched. The runtime creates the mount points
  there. A link would be hidden, so it is reported as omitted. So is a file or a directory of links:
  it is covered by a volume, in which a runtime would leave a mount point, or fail to create one. On
  the container's own tmpfs they are mounted, and the runtime creates the mount point.
- In a volume with shared propagation, a mount would appear on the host, and stay there when the
  container is gone. So it is omitted, unless a CDI spec requires it.
- A directory that a link leads to is made if it is missing: runc makes it, and crun does not start
  the container. A mount whose directory cannot be (links in circles, a file on the way) is
  omitted, unless a CDI spec requires it: then the runtime says so. A mount that a dangling link
  leads to something mounted over ("/run") is made where the link leads.
- A file that is too large to be kept until the end stays where a link is to go, and what the link
  would lead to is mounted over it.
- The files that only a later ``ldconfig`` would read are dispensable: where an image has no room
  for one (its directory is a link to itself, or no directory), it is omitted.
- A read-only rootfs is not touched; :mod:`hooks.image.staging` finds another way.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Final

from api.values import replace
from hooks.image.journal import Journal
from hooks.image.layout import Layout
from hooks.image.loader_files import DISPENSABLE, NOT_IN_A_DIRECTORY, loader_files
from hooks.image.rootfs import Rootfs, components
from hooks.image.rootfs_errors import (
    DeviceDirectoryUnsafe,
    DirectoryInTheWay,
    FileTooLarge,
    NotARegularFile,
    PathRefused,
)
from hooks.image.staging import Placed, is_on_directory, place_beside, stage
from hooks.plan import File, Link, LinkDirectory, Mount, Plan
from hooks.words import KERNELS, end_of

__all__ = ["Placed", "place", "place_inside", "place_unseen", "stage"]

# What stands in the way of a file by its own place, and not by the state of the machine.
_NO_ROOM: Final = (DirectoryInTheWay, FileTooLarge, NotARegularFile, PathRefused)

_DEV: Final = "/dev"
_KERNELS: Final = tuple(f"{directory}/" for directory in KERNELS)


def place(
    rootfs: Rootfs,
    plan: Plan,
    layout: Layout,
    staging_dir: str,
    variables: Mapping[str, str] | None = None,
) -> Placed:
    """Write the files of ``plan`` into the image, or into staging if the image is not writable.

    Args:
        plan: a plan whose libraries are in the directories of ``layout``.
        layout: the layout of this image, read just before.
        staging_dir: our own directory on the host, private to this container. It is created if
            needed: if the rootfs is not writable, or the plan has something to mount from there.
        variables: the container's variables; if the rootfs is not writable, PATH may have to grow.

    Raises:
        RootfsError: it could not be done; the image has not changed.
    """
    _check(plan)
    if layout.writable:
        with Journal(rootfs) as journal:
            placed = _write(journal, rootfs, plan, layout)
            stage(placed, plan, staging_dir)
            return placed.at(plan, staging_dir)
    if plan.devices:
        _refuse_linked_dev(rootfs)
    return place_beside(rootfs, plan, layout, staging_dir, variables or {})


def place_unseen(
    plan: Plan, layout: Layout, staging_dir: str, variables: Mapping[str, str]
) -> Placed:
    """Create the files of ``plan`` in staging, for an image that is not mounted yet.

    Args:
        layout: the result of :func:`hooks.image.layout.staged_layout`.
        variables: the container's variables; LD_LIBRARY_PATH has to grow.

    Raises:
        RootfsError: it could not be done; everything was undone.
    """
    _check(plan)
    return place_beside(None, plan, layout, staging_dir, variables)


def place_inside(rootfs: Rootfs, plan: Plan, layout: Layout, *, fresh: bool) -> Placed:
    """Do the part of :func:`place` that concerns a layer; :func:`stage` does the rest.

    Args:
        fresh: whether each mount point must be a file of the layer, even if the image has a file.

    Raises:
        RootfsError: it could not be done; the image has not changed.
    """
    _check(plan)
    with Journal(rootfs) as journal:
        return _write(journal, rootfs, plan, layout, fresh=fresh)


def _check(plan: Plan) -> None:
    """Refuse paths and names that would lead somewhere else; a foreign CDI spec may hold any."""
    for link in plan.links:
        components(link.path)
        if link.target.startswith("/"):
            components(link.target)
        elif "/" in link.target or not components(f"/{link.target}"):
            raise PathRefused(
                f"the link {link.path} in the image",
                found=f"it leads to {link.target!r}",
                do="name a file next to it or an absolute path",
            )
    for path in (edit.path for edit in (*plan.small, *plan.proc_files)):
        if not components(path):
            raise PathRefused(f"to put something at {path!r}", found="the root itself")
    for links in plan.link_directories:
        _check_names(links)
    for directory in (*plan.first_directories, *plan.library_directories):
        if not components(directory) or not NOT_IN_A_DIRECTORY.isdisjoint(directory):
            raise PathRefused(
                f"to have libraries found in {directory!r}",
                found="a character that no dynamic loader takes in a directory's name",
            )


def _refuse_linked_dev(rootfs: Rootfs) -> None:
    found = rootfs.stat(_DEV, follow=False)
    if found is not None and not stat.S_ISDIR(found.st_mode):
        raise DeviceDirectoryUnsafe(
            "devices in a read-only image",
            found=f"its {_DEV} is no directory, and cannot be made one",
            do="use an image with a directory there, or a writable snapshot",
        )


def _check_names(directory: LinkDirectory) -> None:
    for name, target in directory.links:
        if "/" in name or name in {"", ".", ".."} or "\0" in name + target or not target:
            raise PathRefused(
                f"the link {name!r} in {directory.path}", found=f"it leads to {target!r}"
            )


def _write(
    journal: Journal, rootfs: Rootfs, plan: Plan, layout: Layout, *, fresh: bool = False
) -> Placed:
    lookup = _PathLookup(rootfs, layout)
    omitted: list[str] = []
    mounts: list[Mount] = []
    staged: list[tuple[str, File | LinkDirectory]] = []
    if plan.devices:
        journal.directory_itself(_DEV)
    omitted += _make_mount_points(journal, plan.mounts, lookup, fresh=fresh)
    moved = {m.destination: place for m in plan.mounts if (place := lookup.beyond(m.destination))}
    of_moved = (mount for mount in plan.mounts if mount.destination in moved)
    mounts += (replace(mount, destination=moved[mount.destination]) for mount in of_moved)
    omitted += moved
    for link in plan.links:
        if lookup.is_covered(link.path) or not lookup.is_reachable(link.path):
            omitted.append(link.path)
        else:
            mounts += _make_link(journal, link, plan)
    omitted += _write_loader_files(journal, loader_files(rootfs, plan, layout))
    for edit in plan.small:
        if layout.is_fresh(edit.path):
            staged.append((edit.path, edit))
        elif not lookup.is_open(edit.path):
            omitted.append(edit.path)
        elif isinstance(edit, File):
            journal.file(edit.path, edit.content, edit.mode)
        else:
            journal.directory(edit.path)
            staged.append((edit.path, edit))
    return Placed(
        mounts=tuple(mounts),
        written=tuple(journal.written),
        omitted=tuple(omitted),
        substitutes=tuple(moved.items()),
        staged=tuple(staged),
    )


def _write_loader_files(journal: Journal, files: Mapping[str, bytes]) -> Iterator[str]:
    """Write the files that loaders read; yield the dispensable ones that have no room."""
    for path, content in files.items():
        try:
            journal.file(path, content)
        except _NO_ROOM:
            if path not in DISPENSABLE:
                raise
            yield path


def _make_link(journal: Journal, link: Link, plan: Plan) -> tuple[Mount, ...]:
    """Make a link, or return the mount that takes its place."""
    try:
        journal.link(link.path, link.target)
    except FileTooLarge:
        mount = _behind(link, plan)
        if mount is None:
            raise
        return (replace(mount, destination=link.path),)
    return ()


def _behind(link: Link, plan: Plan) -> Mount | None:
    """Return the mount that a link leads to, possibly through other links."""
    end = end_of(link.path, {each.path: each.target for each in plan.links})
    return next((mount for mount in plan.mounts if mount.destination == end), None)


def _make_mount_points(
    journal: Journal, mounts: Iterable[Mount], lookup: _PathLookup, *, fresh: bool
) -> Iterator[str]:
    """Make the mount points of mounts; yield those that must not be mounted."""
    for mount in mounts:
        where = mount.destination
        is_possible = lookup.is_reachable(where) and not lookup.is_shared(where)
        if not is_possible and not mount.required:
            yield where
        elif not lookup.is_open(where):
            continue
        elif is_on_directory(mount):
            journal.directory(where)
        else:
            journal.mount_point(where, fresh=fresh)


class _PathLookup:
    """Where the directories of paths lead, each looked up once."""

    def __init__(self, rootfs: Rootfs, layout: Layout) -> None:
        self._rootfs = rootfs
        self._layout = layout
        self._covered = frozenset(layout.covered)
        self._known: dict[str, str | None] = {}
        self._landings: dict[str, str | None] = {}
        self._hidden: dict[str, bool] = {}

    def is_open(self, path: str) -> bool:
        """Whether something can be made at ``path`` that the container will see."""
        return self._landing(os.path.dirname(path)) is not None and not self.is_covered(path)

    def is_covered(self, path: str) -> bool:
        """Whether something will be mounted over ``path``, by this name or behind links."""
        directory, _, name = path.rpartition("/")
        landing = self._landing(directory or "/")
        if directory not in self._hidden:
            self._hidden[directory] = self._layout.covers(directory) or (
                landing is not None and self._layout.covers(landing)
            )
        return (
            self._hidden[directory]
            or path in self._covered
            or (landing is not None and f"{landing.rstrip('/')}/{name}" in self._covered)
        )

    def is_reachable(self, path: str) -> bool:
        """Whether a runtime gets to the directory of ``path``, or can make it."""
        directory = os.path.dirname(path)
        landing = self._landing(directory)
        if landing is not None and f"{landing}/".startswith(_KERNELS):
            return False  # runtimes refuse mounts there
        if self.is_covered(path):
            return True  # what is in the image does not matter
        return landing is not None or self._kind(directory) == stat.S_IFDIR

    def beyond(self, path: str) -> str | None:
        """Where a mount at ``path`` goes if a dangling link leads it to what is mounted over.

        There the runtime makes the mount point, but crun not behind such a link.
        """
        directory, _, name = path.rpartition("/")
        landing = self._landing(directory or "/")
        if landing is None or landing == directory or not self.is_covered(path):
            return None  # as of nearly every path; what follows is slow with thousands of mounts
        if not self._layout.covers(landing) or self._layout.covers(directory):
            return None
        is_possible = self.is_reachable(path) and not self.is_shared(path)
        return f"{landing}/{name}" if is_possible and self._is_dangling(directory) else None

    def _is_dangling(self, directory: str) -> bool:
        """Whether a link on the way to a directory leads nowhere in the image."""
        way = accumulate(components(directory), lambda above, name: f"{above}/{name}", initial="")
        links = (path for path in way if path and self._rootfs.read_link(path) is not None)
        return any(self._rootfs.stat(path) is None for path in links)

    def is_shared(self, path: str) -> bool:
        """Whether a mount at ``path`` may appear on the host."""
        if not self._layout.shared:
            return False
        directory, _, name = path.rpartition("/")
        landing = self._landing(directory or "/")
        # Nobody knows where it leads.
        return landing is None or any(
            self._layout.is_shared(each) for each in (path, f"{landing.rstrip('/')}/{name}")
        )

    def _landing(self, directory: str) -> str | None:
        """Where a directory is or would be; None if there can be none."""
        if directory not in self._landings:
            place = self._rootfs.landing(directory, self._known)
            is_file = place is not None and self._kind(place) not in {None, stat.S_IFDIR}
            self._landings[directory] = None if is_file else place
        return self._landings[directory]

    def _kind(self, path: str) -> int | None:
        found = self._rootfs.stat(path)
        return None if found is None else stat.S_IFMT(found.st_mode)
