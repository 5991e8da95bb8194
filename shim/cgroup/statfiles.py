"""The kernel's small files of numbers, as cgroups and procfs have them.

A file that is missing or cannot be read is empty: this kernel does not offer it, or its cgroup
was removed a moment ago. What is not a number is left out. Nothing here is an error.

Source: kernel Documentation/admin-guide/cgroup-v2.rst, "Interface Files".
"""

from __future__ import annotations

import os
from typing import Final

MOST: Final = 2**64 - 1
"""The largest number; larger ones become it."""

# A memory.stat of today has 2 kB, a usage_percpu of the largest machines 160 kB.
_LIMIT: Final = 1 << 20
_DIGITS: Final = 30  # more than a number of 64 bits has
_UNITS: Final = ("KB", "MB", "GB")


def text_of(directory: str, name: str) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        with open(os.path.join(directory, name), "rb") as file:
            return file.read(_LIMIT).decode(errors="replace")
    except OSError:
        return ""


def number(text: str, *, unlimited: int = MOST) -> int | None:
    """The number that a text is.

    Args:
        text: decimal digits, a negative number, or ``max``; surrounding blanks do not matter.
        unlimited: what ``max`` counts as.

    Returns:
        The number within the bounds of an unsigned 64-bit integer; None if it is not a number.
    """
    text = text.strip()
    if text == "max":
        return unlimited
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        return None
    return 0 if digits != text else min(int(digits[:_DIGITS]), MOST)


def table(text: str) -> dict[str, int]:
    """The numbers of a flat keyed file, whose lines are each a key and a number."""
    pairs = (line.split() for line in text.splitlines())
    entries = ((p[0], number(p[1])) for p in pairs if len(p) == 2)  # noqa: PLR2004 - a pair
    return {key: value for key, value in entries if value is not None}


def nested(text: str) -> list[tuple[str, dict[str, str]]]:
    """The entries of a nested keyed file, whose lines are each a key and pairs ``name=value``.

    Returns:
        Each key with its pairs, in the order of the lines; keys without a pair are left out.
    """
    entries = []
    for line in text.splitlines():
        key, *words = line.split() or [""]
        pairs = dict(word.split("=", 1) for word in words if "=" in word)
        if pairs:
            entries.append((key, pairs))
    return entries


def page_sizes(directory: str, suffix: str) -> list[str]:
    """The sizes of huge pages that a hugetlb directory has files for, the largest first.

    Args:
        directory: the cgroup's, in the hierarchy with the hugetlb controller.
        suffix: the end of the files' names: ``.current``, ``.usage_in_bytes``.

    Returns:
        The sizes as the kernel writes them: "1GB", "2MB", "64KB".
    """
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    # hugetlb.2MB.rsvd.current counts reservations, and is another file.
    parts = (name[: -len(suffix)].split(".") for name in names if name.endswith(suffix))
    sizes = [part[1] for part in parts if len(part) == 2 and part[0] == "hugetlb"]  # noqa: PLR2004
    return sorted(sizes, key=_bytes, reverse=True)


def _bytes(size: str) -> tuple[int, int]:
    value, unit = number(size[:-2]) or 0, size[-2:]
    return (_UNITS.index(unit), value) if unit in _UNITS else (-1, value)


def rdma(text: str) -> list[tuple[str, int, int]]:
    """The entries of an rdma file: device, handles and objects of each.

    ``max`` is the largest number of 32 bits, which the field in the message has.
    """
    most = 2**32 - 1
    entries = []
    for device, pairs in nested(text):
        handles = number(pairs.get("hca_handle", "0"), unlimited=most)
        objects = number(pairs.get("hca_object", "0"), unlimited=most)
        entries.append((device, min(handles or 0, most), min(objects or 0, most)))
    return entries
