"""Cover an image's empty files that have names of the driver's libraries.

An image committed from a container with a GPU has an empty file for each mounted library. "docker
run -v" leaves an empty directory if the host lacked the file. A dynamic loader that finds one of
them stops searching, and the program fails with "file too short". In their usual directory, the
driver's libraries cover such files anyway. This module covers those in directories that a loader
searches earlier.

Rules
- It covers only names of libraries that the container gets, and only empty regular files and empty
  directories, so it hides nothing usable. It follows a link to a file of the same library.
- The directories are those of LD_LIBRARY_PATH, and those that musl searches first. The image's
  variable is untrusted like its files: its length is limited, and its paths are resolved inside the
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
"""The reason for these mounts."""

_LONGEST: Final = 16 << 10
_MOST_DIRECTORIES: Final = 16


def covers(
    plan: Plan, rootfs: Rootfs, layout: Layout, variables: Mapping[str, str]
) -> tuple[Mount, ...]:
    """Return mounts of libraries over the image's empty files with their names.

    Args:
        plan: the driver's, with the mounts of its libraries.
        variables: the container's.

    Raises:
        FileTooLarge: the file with musl's search path is too large.
    """
    mounts = {mount.destination: mount for mount in plan.mounts}
    sources: dict[str, str] = {}
    for library in plan.libraries:
        if library.path in mounts:  # the first of each name is for the driver's own architecture
            sources.setdefault(library.soname, mounts[library.path].source)
    covered: dict[str, Mount] = {}
    ours = {*mounts, *(link.path for link in plan.links)}
    for directory in _searched_first(rootfs, layout, variables) if sources else ():
        try:
            for name, place in _empty(rootfs, layout, directory, sources):
                if place not in ours:
                    covered.setdefault(place, Mount(sources[name], place, reason=REASON))
        except RootfsError:
            continue  # nothing here that we can cover
    return tuple(covered.values())


def _searched_first(rootfs: Rootfs, layout: Layout, variables: Mapping[str, str]) -> Iterator[str]:
    """Return the real paths of directories that a loader searches before ours, each once."""
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
    """Return the empty files with these names in a directory, with their real paths."""
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
