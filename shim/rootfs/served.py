"""Whether a mount may hang because it needs a file system of another machine or process.

The kernel waits for the server of such a file system for as long as it takes. So nothing here
touches one. /proc/self/mountinfo lists them without asking their servers; statfs(2) would ask.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from shim.mountinfo import unescape

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from shim.rootfs.mounts import Mount

_TYPES: Final = (
    r"fuse(?!ctl)|nfs|cifs|smb|9p|virtiofs|ceph|afs|lustre|gpfs|beegfs|orangefs|ocfs2|gfs2|autofs"
)
_SERVED: Final = re.compile(_TYPES)
_SERVED_LINE: Final = re.compile(f" - (?:{_TYPES})".encode())
_MOUNT_POINT_FIELD: Final = 4
# The kernel follows as many links in a path.
_MOST_LINKS: Final = 40


def may_hang(mounts: Sequence[Mount]) -> bool:
    """Whether mounting these, or unmounting them, may need a served file system.

    Args:
        mounts: the rootfs, as containerd describes it.
    """
    if any(_SERVED.match(kind) for kind, *_ in mounts):
        return True
    points = _served_mount_points()
    plain: set[str] = set()
    return bool(points) and any(_is_below(path, points, plain) for path in _paths(mounts))


def _served_mount_points() -> frozenset[str]:
    with open("/proc/thread-self/mountinfo", "rb", buffering=0) as file:
        content = file.read()
    points = []
    for found in _SERVED_LINE.finditer(content):
        line = content[content.rfind(b"\n", 0, found.start()) + 1 : found.start()]
        points.append(os.fsdecode(unescape(line.split(b" ")[_MOUNT_POINT_FIELD])))
    return frozenset(points)


def _paths(mounts: Sequence[Mount]) -> Iterator[str]:
    """The paths that mounts name: sources, and the directories of an overlay."""
    for _, source, _, options in mounts:
        yield source
        for option in options:
            yield from option.partition("=")[2].split(":")


def _is_below(path: str, points: Container[str], plain: set[str]) -> bool:
    """Whether a path leads to or below one of some mount points, also through links.

    Args:
        path: a path.
        points: the mount points.
        plain: paths that are known not to be links; those of this path are added.
    """
    if not path.startswith("/"):
        return False
    done, rest, links = "", path.split("/"), 0
    while rest:
        name = rest.pop(0)
        if name == "..":
            done = os.path.dirname(done)
        elif name not in ("", "."):
            done = os.path.join(done or "/", name)
            if done in plain:
                continue
            if done in points:
                return True
            try:
                target = os.readlink(done)
            except OSError:  # not a link; if it is missing, the mount will say so
                plain.add(done)
                continue
            links += 1
            if links > _MOST_LINKS:
                return False
            done = "" if target.startswith("/") else os.path.dirname(done)
            rest = [*target.split("/"), *rest]
    return False
