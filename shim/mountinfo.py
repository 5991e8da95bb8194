"""Find what is mounted at and below a directory, and whether a mount may hang.

A mount may hang if it needs a file system of another machine or process: the kernel waits for such
a file system's server without a limit. So this module touches none. mountinfo lists them without
querying their servers, unlike statfs(2).

Source: proc(5), /proc/PID/mountinfo.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator, Sequence
from typing import Final

_MOUNT_POINT_FIELD: Final = 4
_OCTAL_DIGITS: Final = 3
_TYPES: Final = (
    r"fuse(?!ctl)|nfs|cifs|smb|9p|virtiofs|ceph|afs|lustre|gpfs|beegfs|orangefs|ocfs2|gfs2|autofs"
)
_SERVED: Final = re.compile(_TYPES)
_SERVED_LINE: Final = re.compile(f" - (?:{_TYPES})".encode())
# The kernel's limit of links in a path.
_MOST_LINKS: Final = 40


def mount_points_below(path: str) -> list[str]:
    """Return the mount points at and below a path, in the calling thread's mount namespace.

    Args:
        path: a path, whose last component is not followed if it is a link.

    Returns:
        The mount points, innermost first; one with two mounts is listed twice.
    """
    parent, name = os.path.split(os.path.abspath(path))
    # The kernel lists real paths (/run instead of /var/run).
    real = os.path.join(os.path.realpath(parent), name)
    with open("/proc/thread-self/mountinfo", "rb") as file:
        return select_below(parse_mount_points(file.read()), real)


def select_below(points: list[str], path: str) -> list[str]:
    """Return the mount points that are at or below a path.

    Args:
        points: mount points.
        path: an absolute, real path.

    Returns:
        The mount points, innermost first: nested ones have longer paths.
    """
    below = path.rstrip("/") + "/"
    return sorted((p for p in points if p == path or p.startswith(below)), key=len, reverse=True)


def parse_mount_points(content: bytes) -> list[str]:
    """Return the mount points that a mountinfo file lists.

    Args:
        content: the content of the file.

    Returns:
        Their paths in the order of the file. Lines that are too short are skipped.
    """
    fields = (line.split(b" ", _MOUNT_POINT_FIELD + 1) for line in content.split(b"\n"))
    return [
        os.fsdecode(unescape(f[_MOUNT_POINT_FIELD])) for f in fields if len(f) > _MOUNT_POINT_FIELD
    ]


def unescape(text: bytes) -> bytes:
    r"""Undo the kernel's escapes: ``\040`` for a space, and so on.

    Args:
        text: a field of mountinfo.

    Returns:
        The unescaped bytes. A backslash that starts no escape is kept.
    """
    first, *rest = text.split(b"\\")
    result = bytearray(first)
    for part in rest:
        digits = part[:_OCTAL_DIGITS]
        if len(digits) == _OCTAL_DIGITS and all(c in b"01234567" for c in digits):
            result.append(int(digits, 8) & 0xFF)
            result += part[_OCTAL_DIGITS:]
        else:
            result += b"\\" + part
    return bytes(result)


def may_hang(mounts: Sequence[tuple[str, str, str, Sequence[str]]]) -> bool:
    """Whether mounting or unmounting these may need a served file system.

    Args:
        mounts: containerd's mounts for the rootfs.
    """
    if any(_SERVED.match(kind) for kind, *_ in mounts):
        return True
    points = served_mount_points()
    plain: set[str] = set()
    return bool(points) and any(leads_below(path, points, plain) for path in _paths(mounts))


def is_served(kind: str) -> bool:
    """Whether this kind of file system depends on another machine or process."""
    return _SERVED.match(kind) is not None


def sees_served(pid: int) -> bool:
    """Whether a process sees a file system that may hang; False if it has ended."""
    try:
        with open(f"/proc/{pid}/mountinfo", "rb", buffering=0) as file:
            return _SERVED_LINE.search(file.read()) is not None
    except OSError:
        return False


def served_mount_points() -> frozenset[str]:
    """Return the mount points of file systems that may hang, in this thread's namespace."""
    with open("/proc/thread-self/mountinfo", "rb", buffering=0) as file:
        content = file.read()
    points = []
    for found in _SERVED_LINE.finditer(content):
        line = content[content.rfind(b"\n", 0, found.start()) + 1 : found.start()]
        points.append(os.fsdecode(unescape(line.split(b" ")[_MOUNT_POINT_FIELD])))
    return frozenset(points)


def _paths(mounts: Sequence[tuple[str, str, str, Sequence[str]]]) -> Iterator[str]:
    """Yield the paths in mounts: sources, and the directories of an overlay."""
    for _, source, _, options in mounts:
        yield source
        for option in options:
            yield from option.partition("=")[2].split(":")


def leads_below(path: str, points: Container[str], plain: set[str]) -> bool:
    """Whether a path leads to or below one of these mount points, even through links.

    Args:
        path: a path. A relative one leads nowhere.
        points: the mount points, which are not touched.
        plain: paths known not to be links; this call adds those of this path.
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
            except OSError:  # not a link; if missing, the mount will report it
                plain.add(done)
                continue
            links += 1
            if links > _MOST_LINKS:
                return False
            done = "" if target.startswith("/") else os.path.dirname(done)
            rest = [*target.split("/"), *rest]
    return False
