"""Where the small files and the directories of links of a plan go.

==================================  =========================  ============================
the path is                         a file                     a directory of links
==================================  =========================  ============================
in a writable image                 is written there           is mounted, on a directory
                                                               that is made there
on a tmpfs of the container's own   is mounted, and the runtime makes the mount point
in an image that takes no writes    is mounted, if there is a  is mounted, if there is a
                                    file to be covered         directory to be covered
covered by anything else            is omitted: that is somebody's volume, in which a runtime
                                    would leave a mount point, or fail to make one
==================================  =========================  ============================

What is mounted lies in the container's staging directory, and is read-only inside. So does the
content for files of procfs, which are covered when the container has a procfs
(:mod:`hooks.proc_files`).
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Final

from api.values import value
from hooks.edits.plan import File, LinkDirectory, Mount
from hooks.errors import RootfsError
from hooks.image.rootfs import components
from hooks.image.rootfs_errors import PathRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hooks.edits.plan import Plan, ProcFile
    from hooks.image.journal import Journal
    from hooks.image.layout import Layout
    from hooks.image.rootfs import Rootfs

__all__ = [
    "Small",
    "beside_image",
    "check_small",
    "in_image",
    "mounts_of",
    "proc_files_of",
    "stage",
    "stage_proc_files",
]

_FILES: Final = "/files"
_PROC_FILES: Final = "/proc-files"


@value
class Small:
    """What is to be done with each file and directory of links of a plan.

    Attributes:
        written: files to be written into the image.
        mount_points: directories to be made in the image.
        mounted: what is mounted from staging, by where.
        omitted: paths that there is no room for.
    """

    written: tuple[File, ...] = ()
    mount_points: tuple[str, ...] = ()
    mounted: tuple[tuple[str, File | LinkDirectory], ...] = ()
    omitted: tuple[str, ...] = ()


def check_small(plan: Plan) -> None:
    """Refuses paths and names that would lead somewhere else.

    Raises:
        PathRefused: a path is not absolute and plain, or a name in a directory is none.
    """
    for path in (edit.path for edit in (*_edits(plan), *plan.proc_files)):
        if not components(path):
            raise PathRefused(f"to put something at {path!r}", found="the root itself")
    for directory in plan.link_directories:
        for name, target in directory.links:
            if "/" in name or name in {"", ".", ".."} or "\0" in name + target or not target:
                raise PathRefused(
                    f"the link {name!r} in {directory.path}", found=f"it leads to {target!r}"
                )


def in_image(plan: Plan, layout: Layout, is_open: Callable[[str], bool]) -> Small:
    """What goes where, for an image that takes writes.

    Args:
        plan: with the files.
        layout: of the image.
        is_open: whether what is made in the image at a path is what the container sees there.
    """
    written: list[File] = []
    mount_points: list[str] = []
    mounted: list[tuple[str, File | LinkDirectory]] = []
    omitted: list[str] = []
    for edit in _edits(plan):
        if layout.is_fresh(edit.path):
            mounted.append((edit.path, edit))
        elif not is_open(edit.path):
            omitted.append(edit.path)
        elif isinstance(edit, File):
            written.append(edit)
        else:
            mount_points.append(edit.path)
            mounted.append((edit.path, edit))
    return Small(tuple(written), tuple(mount_points), tuple(mounted), tuple(omitted))


def beside_image(plan: Plan, layout: Layout, rootfs: Rootfs) -> Small:
    """What goes where, for an image that takes no writes.

    Args:
        plan: with the files.
        layout: of the image.
        rootfs: the image, which is only looked at.
    """
    mounted: list[tuple[str, File | LinkDirectory]] = []
    omitted: list[str] = []
    for edit in _edits(plan):
        wanted = stat.S_IFREG if isinstance(edit, File) else stat.S_IFDIR
        over = edit.path if layout.is_fresh(edit.path) else _coverable(rootfs, layout, edit, wanted)
        if over is None:
            omitted.append(edit.path)
        else:
            mounted.append((over, edit))
    return Small(mounted=tuple(mounted), omitted=tuple(omitted))


def _edits(plan: Plan) -> tuple[File | LinkDirectory, ...]:
    return (*plan.files, *plan.link_directories)


def _coverable(
    rootfs: Rootfs, layout: Layout, edit: File | LinkDirectory, wanted: int
) -> str | None:
    """Where what is at the path of ``edit`` really is; None if it cannot be covered."""
    if layout.covers(edit.path):
        return None
    try:
        found = rootfs.stat(edit.path)
        place = rootfs.real_path(edit.path)
    except RootfsError:
        return None
    if found is None or place is None or layout.covers(place):
        return None
    return place if stat.S_IFMT(found.st_mode) == wanted else None


def stage(
    staging: Journal, mounted: Iterable[tuple[str, File | LinkDirectory]], staging_dir: str
) -> tuple[Mount, ...]:
    """Makes in the staging directory what is to be mounted from it.

    Args:
        staging: of that directory.
        mounted: what is mounted, by where.
        staging_dir: where the directory is on the host.

    Returns:
        The mounts.

    Raises:
        RootfsError: it cannot be written.
    """
    mounted = tuple(mounted)
    for _, edit in mounted:
        inside = _FILES + edit.path
        if isinstance(edit, File):
            staging.file(inside, edit.content, edit.mode)
        else:
            staging.directory(inside)
            for name, target in edit.links:
                staging.link(f"{inside}/{name}", target)
    return mounts_of(mounted, staging_dir)


def mounts_of(
    mounted: Iterable[tuple[str, File | LinkDirectory]], staging_dir: str
) -> tuple[Mount, ...]:
    """The mounts that :func:`stage` returns; nothing is made."""
    return tuple(
        Mount(staging_dir + _FILES + edit.path, destination, reason=edit.reason)
        for destination, edit in mounted
    )


def stage_proc_files(
    staging: Journal, proc_files: Iterable[ProcFile], staging_dir: str
) -> tuple[tuple[str, str], ...]:
    """Writes the content for files of procfs.

    Args:
        staging: of the staging directory.
        proc_files: which.
        staging_dir: where that directory is on the host.

    Returns:
        Where each content is on the host, by the path in the container.

    Raises:
        RootfsError: it cannot be written.
    """
    proc_files = tuple(proc_files)
    for file in proc_files:
        staging.file(_PROC_FILES + file.path, file.content, 0o444)
    return proc_files_of(proc_files, staging_dir)


def proc_files_of(proc_files: Iterable[ProcFile], staging_dir: str) -> tuple[tuple[str, str], ...]:
    """What :func:`stage_proc_files` returns; nothing is written."""
    return tuple((file.path, staging_dir + _PROC_FILES + file.path) for file in proc_files)
