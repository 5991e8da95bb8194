"""Writes a plan's files into an image, before any process of the container exists.

:func:`place` makes, in this order:

- /dev as a directory, if devices are to be made in it: before runc 1.3.6 and crun 1.28 a
  runtime follows a link there out of the image (CVE-2026-41579, CVE-2026-47766);
- the mount points of the plan's mounts, so that the runtime has none to make, and finds no
  link there whose target it would mount over;
- the plan's links: sonames beside their libraries, and others;
- the files that the image's dynamic loaders read (:mod:`hooks.image.loader_files`);
- the plan's own files and directories of links (:mod:`hooks.image.small_files`).

All of it goes through a :class:`Journal`: the same plan again changes nothing, and a failure
takes everything back.

Rules
- What something is mounted over in the container is left alone: the runtime makes the mount
  points there, and a link would be hidden, so it is reported as omitted.
- A mount point whose directory is a link that leads nowhere is left to the runtime too: the
  link may lead to what is mounted later ("/var/run" to "/run"). Runtimes resolve it inside.
- A file that is too large to be kept until the end stays where a link is to go, and what the link
  would lead to is mounted over it.
- The files that only a later ``ldconfig`` would read are dispensable: where an image has no room
  for one (its directory is a dangling link, or no directory), it is omitted.
- A read-only rootfs is not touched; :mod:`hooks.image.staging` finds another way.
"""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from api.values import changed, value
from hooks.image.journal import Journal
from hooks.image.loader_files import DISPENSABLE, NOT_IN_A_DIRECTORY, loader_files
from hooks.image.rootfs import Rootfs, components
from hooks.image.rootfs_errors import (
    DeviceDirectoryUnsafe,
    DirectoryInTheWay,
    FileTooLarge,
    NotARegularFile,
    PathRefused,
    RootfsUnavailable,
)
from hooks.image.small_files import (
    beside_image,
    check_small,
    in_image,
    mounts_of,
    proc_files_of,
    stage,
    stage_proc_files,
)
from hooks.image.staging import fill_staging, is_on_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hooks.edits.plan import File, Link, LinkDirectory, Mount, Plan
    from hooks.image.layout import Layout
    from hooks.image.staging import Staged

__all__ = ["Inside", "Placed", "as_staged", "place", "place_inside", "stage_beside"]

# What stands in the way of a file by its own place, and not by the state of the machine.
_NO_ROOM = (DirectoryInTheWay, FileTooLarge, NotARegularFile, PathRefused)

_DEV = "/dev"
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@value
class Placed:
    """What was done for a plan, and what is left for the spec.

    Attributes:
        mounts: mounts that have to come before those of the plan.
        proc_files: of the plan's files of procfs, where on the host each one's content is,
            by its path in the container.
        environment: variables for every process of the container, with their whole values.
        written: paths in the image that were made or changed, in order.
        omitted: destinations of the plan's mounts, and paths of its links and files, that this
            image has no room for. Such a mount has to be left out of the spec.
    """

    mounts: tuple[Mount, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    written: tuple[str, ...] = ()
    omitted: tuple[str, ...] = ()
    proc_files: tuple[tuple[str, str], ...] = ()


@value
class Inside:
    """What was done in an image that takes writes, and what is left to do beside it.

    Attributes:
        written: as in :class:`Placed`.
        omitted: as in :class:`Placed`.
        mounted: what is to be mounted from staging, by where.
        mounts: further mounts, of the host's files.
    """

    written: tuple[str, ...] = ()
    omitted: tuple[str, ...] = ()
    mounted: tuple[tuple[str, File | LinkDirectory], ...] = ()
    mounts: tuple[Mount, ...] = ()


def place(
    rootfs: Rootfs,
    plan: Plan,
    layout: Layout,
    staging_dir: str,
    *,
    library_path: str = "",
    path: str = "",
) -> Placed:
    """Writes the files of ``plan`` into the image, or into staging if that takes no writes.

    Args:
        rootfs: the image.
        plan: whose libraries are in the directories of ``layout``.
        layout: of this image, read just before.
        staging_dir: a directory of ours on the host, private to this container. It is made if
            needed: if the rootfs takes no writes, or the plan has what is mounted from there.
        library_path: the LD_LIBRARY_PATH that the spec sets.
        path: the PATH that the spec sets.

    Returns:
        What was done.

    Raises:
        RootfsError: it could not be done; the image is as it was.
    """
    _check(plan)
    if not layout.writable and plan.devices:
        _refuse_linked_dev(rootfs)
    if layout.writable:
        return _into_image(rootfs, plan, layout, staging_dir)
    staged, placed = _into_staging(rootfs, plan, layout, staging_dir)
    environment = (
        *_extended("LD_LIBRARY_PATH", library_path, staged.search),
        *_extended("PATH", path or _DEFAULT_PATH, staged.programs),
    )
    return changed(placed, environment=environment)


def place_inside(rootfs: Rootfs, plan: Plan, layout: Layout) -> Inside:
    """The part of :func:`place` that is done in an image.

    Args:
        rootfs: the image, which takes writes.
        plan: whose libraries are in the directories of ``layout``.
        layout: of this image, read just before.

    Returns:
        What was done; :func:`stage_beside` does the rest.

    Raises:
        RootfsError: it could not be done; the image is as it was.
    """
    _check(plan)
    with Journal(rootfs) as journal:
        return _write(journal, rootfs, plan, layout)


def as_staged(inside: Inside, plan: Plan, staging_dir: str) -> Placed:
    """What :func:`stage_beside` will return; nothing is written.

    Args:
        inside: what is in the image.
        plan: whose files of procfs are to be staged.
        staging_dir: as for :func:`place`.
    """
    return Placed(
        mounts=(*inside.mounts, *mounts_of(inside.mounted, staging_dir)),
        written=inside.written,
        omitted=inside.omitted,
        proc_files=proc_files_of(plan.proc_files, staging_dir),
    )


def stage_beside(inside: Inside, plan: Plan, staging_dir: str) -> Placed:
    """Puts into staging what a plan has mounted from there, beside what is in the image.

    Args:
        inside: what is in the image.
        plan: whose files of procfs are staged.
        staging_dir: as for :func:`place`.

    Returns:
        What :func:`place` would have returned.

    Raises:
        RootfsError: it could not be done; nothing of it is left.
    """
    if inside.mounted or plan.proc_files:
        with _staging(staging_dir) as staging:
            stage(staging, inside.mounted, staging_dir)
            stage_proc_files(staging, plan.proc_files, staging_dir)
    return as_staged(inside, plan, staging_dir)


def _check(plan: Plan) -> None:
    """Refuses names that would not stay names; a foreign CDI spec may hold any."""
    for link in plan.links:
        components(link.path)
        if link.target.startswith("/"):
            components(link.target)
        elif "/" in link.target or not components(f"/{link.target}"):
            raise PathRefused(
                f"the link {link.path} in the image",
                found=f"it leads to {link.target!r}",
                do="name a file beside it or an absolute path",
            )
    check_small(plan)
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


def _into_image(rootfs: Rootfs, plan: Plan, layout: Layout, staging_dir: str) -> Placed:
    with Journal(rootfs) as journal:
        return stage_beside(_write(journal, rootfs, plan, layout), plan, staging_dir)


def _write(journal: Journal, rootfs: Rootfs, plan: Plan, layout: Layout) -> Inside:
    ways = _Ways(rootfs, layout)
    omitted = []
    mounts: list[Mount] = []
    if plan.devices:
        journal.directory_itself(_DEV)
    _make_mount_points(journal, plan.mounts, ways)
    for link in plan.links:
        if ways.is_covered(link.path):
            omitted.append(link.path)
        else:
            mounts += _make_link(journal, link, plan)
    for path, content in loader_files(rootfs, plan, layout).items():
        try:
            journal.file(path, content)
        except _NO_ROOM:
            if path not in DISPENSABLE:
                raise
            omitted.append(path)
    small = in_image(plan, layout, ways.is_open)
    for file in small.written:
        journal.file(file.path, file.content, file.mode)
    for path in small.mount_points:
        journal.directory(path)
    left_out = (*omitted, *small.omitted)
    return Inside(tuple(journal.written), left_out, small.mounted, tuple(mounts))


def _make_link(journal: Journal, link: Link, plan: Plan) -> tuple[Mount, ...]:
    """Makes a link, or says what is to be mounted in its place."""
    try:
        journal.link(link.path, link.target)
    except FileTooLarge:
        mount = _behind(link, plan)
        if mount is None:
            raise
        return (changed(mount, destination=link.path),)
    return ()


def _behind(link: Link, plan: Plan) -> Mount | None:
    """The mount that a link leads to, perhaps by other links."""
    links = {each.path: each for each in plan.links}
    mounts = {each.destination: each for each in plan.mounts}
    for _ in links:
        path = os.path.normpath(os.path.join(os.path.dirname(link.path), link.target))
        if path in mounts:
            return mounts[path]
        if path not in links:
            return None
        link = links[path]
    return None


def _make_mount_points(journal: Journal, mounts: Iterable[Mount], ways: _Ways) -> None:
    for mount in mounts:
        if not ways.is_open(mount.destination):
            continue
        if is_on_directory(mount):
            journal.directory(mount.destination)
        else:
            journal.mount_point(mount.destination)


def _into_staging(
    rootfs: Rootfs, plan: Plan, layout: Layout, staging_dir: str
) -> tuple[Staged, Placed]:
    small = beside_image(plan, layout, rootfs)
    with _staging(staging_dir) as journal:
        staged = fill_staging(rootfs, journal, plan, layout, staging_dir)
        mounts = stage(journal, small.mounted, staging_dir)
        proc_files = stage_proc_files(journal, plan.proc_files, staging_dir)
    return staged, Placed(
        mounts=(*staged.mounts, *mounts),
        omitted=(*staged.omitted, *small.omitted),
        proc_files=proc_files,
    )


@contextmanager
def _staging(staging_dir: str) -> Iterator[Journal]:
    """The staging directory, made if needed; what is put into it stays, or goes upon failure."""
    try:
        os.makedirs(staging_dir, mode=0o700, exist_ok=True)
    except OSError as error:
        raise RootfsUnavailable(
            f"the staging directory {staging_dir}", found=str(error.strerror)
        ) from error
    with Rootfs.open(staging_dir) as staging, Journal(staging) as journal:
        yield journal


def _extended(name: str, before: str, directories: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """A variable with ``directories`` behind what the spec has in it."""
    known = [part for part in before.split(":") if part]
    missing = [part for part in directories if part not in known]
    return ((name, ":".join([*known, *missing])),) if missing else ()


class _Ways:
    """Where the directories of paths lead; they repeat, so each is looked up once."""

    def __init__(self, rootfs: Rootfs, layout: Layout) -> None:
        self._rootfs = rootfs
        self._layout = layout
        self._covered = frozenset(layout.covered)
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

    def _landing(self, directory: str) -> str | None:
        """Where a directory is or would be; None if it leads nowhere."""
        if directory not in self._landings:
            self._landings[directory] = self._rootfs.landing(directory, self._landings)
        return self._landings[directory]
