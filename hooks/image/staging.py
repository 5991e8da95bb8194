"""What takes the place of an image's files when its rootfs takes no writes.

A runtime has to make a mount point for every mount, and on a read-only file system it cannot.
But nearly every container has a tmpfs on /run or /dev, which :mod:`hooks.image.layout` has chosen
for the libraries. So the directory of libraries is made in the staging directory instead, with
an empty file for every library and a link for every soname; it is mounted on the tmpfs, and
the plan's libraries are mounted on the files in it. Programs that the image has no room for have
a directory there as well, which comes last in PATH.

Rules
- The image's ld.so.cache (or musl's path file) is covered by a merged one, if it is there to
  be covered. If not, LD_LIBRARY_PATH is the last resort.
- A mount of the plan that has no mount point in the image, and a link that is not in it, are
  omitted. Libraries are what a container cannot be started without: if there is no tmpfs for
  them, that is an error, and so it is of a mount that is required.
- The staging directory is private to us (0700), what is mounted from it is readable to all.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final

from api.values import changed, value
from hooks.edits.plan import Mount
from hooks.errors import RootfsError
from hooks.image.layout import CACHE, SCRATCH, Libc
from hooks.image.loader_files import MUSL_PATHS, loader_files
from hooks.image.rootfs_errors import RootfsReadOnly

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hooks.edits.plan import Link, Plan
    from hooks.image.journal import Journal
    from hooks.image.layout import Layout, Loader
    from hooks.image.rootfs import Rootfs

__all__ = ["Staged", "fill_staging", "is_on_directory"]

_PROGRAMS: Final = "/programs"
# Where programs are looked for that nobody names by their whole path.
_OF_PROGRAMS: Final = frozenset({"/usr/bin", "/usr/sbin", "/bin", "/sbin"})


@value
class Staged:
    """What staging offers to the container.

    Attributes:
        mounts: of staging's directories and files; before those of the plan.
        search: directories that have to be in LD_LIBRARY_PATH.
        programs: directories that have to be in PATH.
        omitted: destinations of mounts, and paths of links, that there is no room for.
    """

    mounts: tuple[Mount, ...]
    search: tuple[str, ...]
    omitted: tuple[str, ...]
    programs: tuple[str, ...] = ()


def is_on_directory(mount: Mount) -> bool:
    """Whether a mount goes on a directory, and not on a file."""
    return mount.kind != "bind" or os.path.isdir(mount.source)


def fill_staging(
    rootfs: Rootfs, journal: Journal, plan: Plan, layout: Layout, staging_dir: str
) -> Staged:
    """Makes in the staging directory what cannot be made in the image.

    Args:
        rootfs: the image, which is only looked at.
        journal: of the staging directory.
        plan: whose libraries are in the directories of ``layout``.
        layout: of this image.
        staging_dir: where the staging directory is on the host, for the mounts.

    Returns:
        What the container's spec needs to have of it.

    Raises:
        RootfsReadOnly: there is no room for the libraries anywhere.
        RootfsError: the staging directory cannot be written.
    """
    if plan.libraries and layout.scratch is None:
        raise RootfsReadOnly(
            "to give the container the driver's libraries",
            found="a read-only rootfs, and no writable tmpfs on /run or /dev",
            do="use a writable snapshot, or mount a tmpfs on /run",
        )
    homes = _Homes(layout)
    omitted = _fill_homes(rootfs, journal, plan, layout, homes)
    mounts = [
        Mount(f"{staging_dir}{homes.home(loader)}", loader.directory, reason="driver libraries")
        for loader in homes.used()
    ]
    programs = _programs_home(layout)
    if homes.programs:
        mounts.append(Mount(staging_dir + _PROGRAMS, programs, reason="driver programs"))
        mounts.extend(homes.programs)
    told = set()
    for path, content in loader_files(rootfs, plan, layout).items():
        over = _coverable(rootfs, layout, path)
        if over is not None and (path == CACHE or path in MUSL_PATHS.values()):
            journal.file(path, content)
            mounts.append(Mount(f"{staging_dir}{path}", over, reason="finds driver libraries"))
            told.add(path)
    search: list[str] = []
    for loader in homes.used():
        if _index(loader) not in told:
            below = f"{loader.directory}/"
            search.extend(d for d in plan.first_directories if d not in search)
            search.append(loader.directory)
            search.extend(d for d in plan.library_directories if d.startswith(below))
    search_programs = (programs,) if homes.programs else ()
    return Staged(tuple(mounts), tuple(search), tuple(omitted), search_programs)


def _fill_homes(
    rootfs: Rootfs, journal: Journal, plan: Plan, layout: Layout, homes: _Homes
) -> list[str]:
    """Makes mount points and links in staging; returns what there is no room for."""
    omitted = []
    taken: list[Mount] = []
    for mount in plan.mounts:
        inside = homes.staged(mount.destination)
        if inside is None:
            if _takes(rootfs, layout, mount) or _is_in_one(mount, taken):
                taken.append(mount)
            elif mount.required:
                raise RootfsReadOnly(
                    f"a mount at {mount.destination} for {mount.reason}",
                    found="a read-only rootfs that has nothing there to mount over",
                    do="use a writable snapshot, or an image that has it",
                )
            else:
                omitted.append(mount.destination)
                homes.add_program(mount, journal)
        elif is_on_directory(mount):
            journal.directory(inside)
        else:
            journal.mount_point(inside)
    for link in plan.links:
        inside = homes.staged(link.path)
        if inside is not None:
            journal.link(inside, link.target)
        elif not _has(rootfs, link):
            omitted.append(link.path)
    return omitted


class _Homes:
    """The loaders' directories on the tmpfs, and what stands for them in staging."""

    def __init__(self, layout: Layout) -> None:
        self._loaders = layout.loaders if layout.scratch is not None else ()
        self._used: dict[Loader, None] = {}
        self._programs = _programs_home(layout)
        self.programs: list[Mount] = []

    def home(self, loader: Loader) -> str:
        """The path in staging of what is mounted at ``loader.directory``."""
        return f"/libraries/{loader.arch.value}"

    def staged(self, path: str) -> str | None:
        """The path in staging of what is at ``path`` in the container, if staging has it."""
        for loader in self._loaders:
            if path.startswith(f"{loader.directory}/"):
                self._used[loader] = None
                return self.home(loader) + path[len(loader.directory) :]
        return None

    def used(self) -> tuple[Loader, ...]:
        """The loaders whose directories have something in them."""
        return tuple(self._used)

    def add_program(self, mount: Mount, staging: Journal) -> None:
        """Have a program beside the libraries, if it is one, as the image has no room for it."""
        directory, _, name = mount.destination.rpartition("/")
        if self._programs and directory in _OF_PROGRAMS and not is_on_directory(mount):
            staging.mount_point(f"{_PROGRAMS}/{name}")
            self.programs.append(changed(mount, destination=f"{self._programs}/{name}"))


def _programs_home(layout: Layout) -> str:
    """Where programs are in the container that have no room in the image; "" for nowhere."""
    return f"{layout.scratch}/{SCRATCH}/bin" if layout.scratch is not None else ""


def _index(loader: Loader) -> str | None:
    """The file by which a loader finds libraries outside of its default directories."""
    if loader.libc is Libc.GLIBC:
        return CACHE
    return MUSL_PATHS[loader.arch] if loader.libc is Libc.MUSL else None


def _takes(rootfs: Rootfs, layout: Layout, mount: Mount) -> bool:
    """Whether the image has a mount point for ``mount``, or gets one from another mount."""
    if layout.covers(mount.destination):
        return True
    try:
        found = rootfs.stat(mount.destination)
    except RootfsError:
        return False
    return found is not None and stat.S_ISDIR(found.st_mode) == is_on_directory(mount)


def _is_in_one(mount: Mount, others: Iterable[Mount]) -> bool:
    """Whether the mount point of ``mount`` is in another mount, or can be made there."""
    for other in others:
        if mount.destination.startswith(f"{other.destination}/"):
            below = mount.destination.removeprefix(other.destination)
            return other.kind != "bind" or os.path.lexists(other.source + below)
    return False


def _has(rootfs: Rootfs, link: Link) -> bool:
    try:
        return rootfs.read_link(link.path) == link.target
    except RootfsError:
        return False


def _coverable(rootfs: Rootfs, layout: Layout, path: str) -> str | None:
    """Where the regular file at ``path`` really is; None if nothing can be mounted over it."""
    try:
        found = rootfs.stat(path)
        place = rootfs.real_path(path)
    except RootfsError:
        return None
    if found is None or place is None or layout.covers(place):
        return None
    return place if stat.S_ISREG(found.st_mode) else None
