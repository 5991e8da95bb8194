"""Write a plan's files into an image, before any process of the container exists.

:func:`place` creates, in this order:

- /dev as a directory, if devices are created in it: runtimes before runc 1.3.6 and crun 1.28 follow
  a link there out of the image (CVE-2026-41579, CVE-2026-47766);
- the mount points of the plan's mounts, so that the runtime creates none, and finds no link whose
  target it would mount over;
- the plan's links: sonames next to their libraries, and others;
- the files that the image's dynamic loaders read (:mod:`hooks.image.loader_files`);
- the plan's own files, and mount points of its link directories.

Changes go through a :class:`Journal`: the same plan again changes nothing, and a failure undoes
everything.

Rules
- Nothing changes below a mount of the container, where the runtime creates the mount points. A link
  there would be hidden, so it is reported as omitted. So is a file or a link directory in a volume,
  where a runtime would leave a mount point or fail to create one. On the container's own tmpfs they
  are mounted, and the runtime creates the mount point.
- In a volume with shared propagation, a mount would appear on the host and outlive the container.
  So it is omitted, unless a CDI spec requires it.
- The missing target directory of a link is created, as runc would; crun would fail. A mount whose
  directory is impossible (a cycle of links, a file on the way) is omitted, unless a CDI spec
  requires it: then the runtime reports the error. If a dangling link leads a mount below another
  mount ("/run"), the mount moves to the link's target.
- If a file in the place of a link is too large to keep until the end, it stays, and the link's
  target is mounted over it.
- Files that only a later ``ldconfig`` would read are omitted where an image has no room for them
  (the directory is a link to itself, or not a directory).
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

# Obstacles in the image, not in the state of the machine.
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
    """Write the files of ``plan`` into the image, or into staging if it is not writable.

    Args:
        plan: a plan whose libraries are in the directories of ``layout``.
        layout: the layout of this image, read just before.
        staging_dir: our own directory on the host, private to this container. It is created if the
            rootfs is not writable, or if the plan mounts something from there.
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
    """Do the part of :func:`place` in a layer; :func:`stage` does the rest.

    Args:
        fresh: whether each mount point must be a file of the layer, even if the image has a file.

    Raises:
        RootfsError: it could not be done; the image has not changed.
    """
    _check(plan)
    with Journal(rootfs) as journal:
        return _write(journal, rootfs, plan, layout, fresh=fresh)


def _check(plan: Plan) -> None:
    """Refuse paths and names that would lead elsewhere; a foreign CDI spec may have any."""
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
    """Write the files that loaders read; yield the dispensable ones without room."""
    for path, content in files.items():
        try:
            journal.file(path, content)
        except _NO_ROOM:
            if path not in DISPENSABLE:
                raise
            yield path


def _make_link(journal: Journal, link: Link, plan: Plan) -> tuple[Mount, ...]:
    """Create a link, or return a mount that replaces it."""
    try:
        journal.link(link.path, link.target)
    except FileTooLarge:
        mount = _behind(link, plan)
        if mount is None:
            raise
        return (replace(mount, destination=link.path),)
    return ()


def _behind(link: Link, plan: Plan) -> Mount | None:
    """Return the mount at the end of a link, possibly through other links."""
    end = end_of(link.path, {each.path: each.target for each in plan.links})
    return next((mount for mount in plan.mounts if mount.destination == end), None)


def _make_mount_points(
    journal: Journal, mounts: Iterable[Mount], lookup: _PathLookup, *, fresh: bool
) -> Iterator[str]:
    """Create mount points; yield the mounts to omit."""
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
    """Where the directories of paths lead; each is looked up once."""

    def __init__(self, rootfs: Rootfs, layout: Layout) -> None:
        self._rootfs = rootfs
        self._layout = layout
        self._covered = frozenset(layout.covered)
        self._known: dict[str, str | None] = {}
        self._landings: dict[str, str | None] = {}
        self._hidden: dict[str, bool] = {}

    def is_open(self, path: str) -> bool:
        """Whether the container will see a file created at ``path``."""
        return self._landing(os.path.dirname(path)) is not None and not self.is_covered(path)

    def is_covered(self, path: str) -> bool:
        """Whether a mount will cover ``path``, by this name or after links."""
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
        """Whether a runtime can reach or create the directory of ``path``."""
        directory = os.path.dirname(path)
        landing = self._landing(directory)
        if landing is not None and f"{landing}/".startswith(_KERNELS):
            return False  # runtimes refuse mounts there
        if self.is_covered(path):
            return True  # the image's content does not matter
        return landing is not None or self._kind(directory) == stat.S_IFDIR

    def beyond(self, path: str) -> str | None:
        """Return where a mount at ``path`` goes if a dangling link leads it below another mount.

        The runtime creates the mount point there, but crun does not follow such a link.
        """
        directory, _, name = path.rpartition("/")
        landing = self._landing(directory or "/")
        if landing is None or landing == directory or not self.is_covered(path):
            return None  # as for nearly every path; the rest is slow with thousands of mounts
        if not self._layout.covers(landing) or self._layout.covers(directory):
            return None
        is_possible = self.is_reachable(path) and not self.is_shared(path)
        return f"{landing}/{name}" if is_possible and self._is_dangling(directory) else None

    def _is_dangling(self, directory: str) -> bool:
        """Whether a link on the way to a directory is dangling in the image."""
        way = accumulate(components(directory), lambda above, name: f"{above}/{name}", initial="")
        links = (path for path in way if path and self._rootfs.read_link(path) is not None)
        return any(self._rootfs.stat(path) is None for path in links)

    def is_shared(self, path: str) -> bool:
        """Whether a mount at ``path`` may appear on the host."""
        if not self._layout.shared:
            return False
        directory, _, name = path.rpartition("/")
        landing = self._landing(directory or "/")
        # It may lead anywhere.
        return landing is None or any(
            self._layout.is_shared(each) for each in (path, f"{landing.rstrip('/')}/{name}")
        )

    def _landing(self, directory: str) -> str | None:
        """Return where a directory is or would be; None if it is impossible."""
        if directory not in self._landings:
            place = self._rootfs.landing(directory, self._known)
            is_file = place is not None and self._kind(place) not in {None, stat.S_IFDIR}
            self._landings[directory] = None if is_file else place
        return self._landings[directory]

    def _kind(self, path: str) -> int | None:
        found = self._rootfs.stat(path)
        return None if found is None else stat.S_IFMT(found.st_mode)
