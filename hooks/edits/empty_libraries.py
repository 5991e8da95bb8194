"""Empty files of an image that have the names of the driver's libraries.

If a container with a GPU is committed, the image has an empty file for each library that was
mounted there. "docker run -v" leaves an empty directory if the host lacked the file. A dynamic
loader that finds one of them stops searching, and the program fails with "file too short". Where
the driver's own libraries go, they are mounted over such files anyway. This module mounts them over
those in the directories that a loader searches first.

Rules
- Only names of libraries that the container gets are covered, and only empty regular files and
  empty directories, so nothing of the image that could be used is hidden. A link is followed if it
  leads to a file of the same library.
- The directories are those of LD_LIBRARY_PATH, and those that musl searches first. The image's
  variable is untrusted like its files: its length is limited, and paths are resolved inside the
  image.
- Paths that a volume covers are neither read nor mounted over.

Source: ld.so(8); musl's ldso/dynlink.c.
"""

from __future__ import annotations

import posixpath
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Final

from hooks.errors import RootfsError
from hooks.image.layout import Layout, Libc
from hooks.image.loader_files import musl_directories
from hooks.image.rootfs import Rootfs
from hooks.plan import Mount, Plan

REASON: Final = "in place of an empty file of the image, at which the loader stops"
"""The reason of these mounts."""

_LONGEST: Final = 16 << 10
_MOST_DIRECTORIES: Final = 16


def covers(
    plan: Plan, rootfs: Rootfs, layout: Layout, variables: Mapping[str, str]
) -> tuple[Mount, ...]:
    """Return mounts of libraries over the image's empty files of their names.

    Args:
        plan: of the driver, with the mounts of its libraries.
        variables: of the container.

    Raises:
        FileTooLarge: the file that names musl's directories has an absurd size.
    """
    mounts = {mount.destination: mount for mount in plan.mounts}
    sources: dict[str, str] = {}
    for library in plan.libraries:
        if library.path in mounts:  # the first of a name is of the driver's own architecture
            sources.setdefault(library.soname, mounts[library.path].source)
    covered: dict[str, Mount] = {}
    ours = {*mounts, *(link.path for link in plan.links)}
    for directory in _searched_first(rootfs, layout, variables) if sources else ():
        try:
            for name, place in _empty(rootfs, layout, directory, sources):
                if place not in ours:
                    covered.setdefault(place, Mount(sources[name], place, reason=REASON))
        except RootfsError:
            continue  # whatever is in this directory is none of ours
    return tuple(covered.values())


def _searched_first(rootfs: Rootfs, layout: Layout, variables: Mapping[str, str]) -> Iterator[str]:
    """The directories that a loader searches before ours, where they really are, each once."""
    named = re.split("[:;]", variables.get("LD_LIBRARY_PATH", "")[:_LONGEST])
    for loader in layout.loaders:
        if loader.libc is Libc.MUSL:
            named += musl_directories(rootfs, loader.arch)
    paths = dict.fromkeys(path for path in named if path.startswith("/"))
    known: set[str] = set()
    for path in islice(paths, _MOST_DIRECTORIES):
        try:
            place = rootfs.real_path(path)
        except RootfsError:
            continue
        if place is not None and place not in known and not layout.covers(place):
            known.add(place)
            yield place


def _empty(
    rootfs: Rootfs, layout: Layout, directory: str, names: Collection[str]
) -> Iterator[tuple[str, str]]:
    """The empty files of some names in a directory, and where each really is."""
    for name in rootfs.names(directory) or ():
        place = rootfs.real_path(f"{directory}/{name}") if name in names else None
        if place is None or layout.covers(place):
            continue
        is_alike = posixpath.basename(place).startswith(f"{name.partition('.so')[0]}.so")
        if is_alike and _is_empty(rootfs, place):
            yield name, place


def _is_empty(rootfs: Rootfs, path: str) -> bool:
    found = rootfs.stat(path, follow=False)
    if found is None or not stat.S_ISDIR(found.st_mode):
        return found is not None and stat.S_ISREG(found.st_mode) and found.st_size == 0
    return not rootfs.names(path)
