"""What is mounted at and below a directory.

Source: proc(5), /proc/PID/mountinfo.
"""

from __future__ import annotations

import os
from typing import Final

_MOUNT_POINT_FIELD: Final = 4
_OCTAL_DIGITS: Final = 3


def mount_points_below(path: str) -> list[str]:
    """The mount points at and below a path, in the calling thread's mount namespace.

    Args:
        path: a path; its last component is not followed if it is a link.

    Returns:
        The mount points, innermost first; one that is mounted on twice is there twice.
    """
    parent, name = os.path.split(os.path.abspath(path))
    # The kernel lists real paths (/run, where /var/run was said).
    real = os.path.join(os.path.realpath(parent), name)
    with open("/proc/thread-self/mountinfo", "rb") as file:
        return select_below(parse_mount_points(file.read()), real)


def select_below(points: list[str], path: str) -> list[str]:
    """Those of some mount points that are a path or are below it.

    Args:
        points: mount points.
        path: an absolute, real path.

    Returns:
        Innermost first: what lies in a directory has a longer path than the directory.
    """
    below = path.rstrip("/") + "/"
    return sorted((p for p in points if p == path or p.startswith(below)), key=len, reverse=True)


def parse_mount_points(content: bytes) -> list[str]:
    """The mount points that a mountinfo file lists.

    Args:
        content: the file.

    Returns:
        Their paths in the order of the file. Lines too short to have one are skipped.
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
        The bytes that it stands for. A backslash that begins no escape stands for itself.
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
