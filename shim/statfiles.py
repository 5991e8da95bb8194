"""The kernel's small files of numbers, as cgroups and procfs have them.

What is missing, cannot be read or is no number is not offered by this kernel, or has gone a
moment ago: it is left out, and never an error. Two processes never read the same instant, so
there is nothing to be exact about.

Source: kernel Documentation/admin-guide/cgroup-v2.rst, "Interface Files".
"""

from __future__ import annotations

import os
from typing import Final

MOST: Final = 2**64 - 1

# A memory.stat of today has 2 kB, a usage_percpu of the largest machines 160 kB.
_LIMIT: Final = 1 << 20


def read(directory: str, name: str) -> str | None:
    """A file's text.

    Args:
        directory: the file's.
        name: the file.

    Returns:
        Its text; None if it is not there or cannot be read.
    """
    try:
        with open(os.path.join(directory, name), "rb") as file:
            return file.read(_LIMIT).decode(errors="replace")
    except OSError:
        return None


def to_number(text: str, *, unlimited: int = MOST) -> int | None:
    """The number that a text is.

    Args:
        text: decimal digits, a negative number, or ``max``; blanks around it do not matter.
        unlimited: what ``max`` counts as.

    Returns:
        The number within the bounds of an unsigned 64-bit integer; None if it is none.
    """
    text = text.strip()
    if text == "max":
        return unlimited
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        return None
    return 0 if digits != text else min(int(digits[:_DIGITS]), MOST)


_DIGITS: Final = 30  # more than a number of 64 bits has


def number(directory: str, name: str, *, unlimited: int = MOST) -> int | None:
    """The number that is all of a file; see :func:`read` and :func:`to_number`."""
    text = read(directory, name)
    return None if text is None else to_number(text, unlimited=unlimited)


def to_table(text: str) -> dict[str, int]:
    """The numbers of a text whose lines are each a key and a number.

    Args:
        text: other lines in it are skipped.
    """
    pairs = (line.split() for line in text.splitlines())
    entries = ((p[0], to_number(p[1])) for p in pairs if len(p) == 2)  # noqa: PLR2004 - a pair
    return {key: value for key, value in entries if value is not None}


def table(directory: str, name: str) -> dict[str, int]:
    """The numbers of a flat keyed file; none if it cannot be read."""
    return to_table(read(directory, name) or "")


def to_nested(text: str) -> list[tuple[str, dict[str, str]]]:
    """The entries of a text whose lines are each a key and pairs ``name=value``.

    Args:
        text: lines without a pair are skipped, and words that are none.

    Returns:
        Each key with its pairs, in the order of the lines.
    """
    entries = []
    for line in text.splitlines():
        key, *words = line.split() or [""]
        pairs = dict(word.split("=", 1) for word in words if "=" in word)
        if pairs:
            entries.append((key, pairs))
    return entries


def nested(directory: str, name: str) -> list[tuple[str, dict[str, str]]]:
    """The entries of a nested keyed file; none if it cannot be read."""
    return to_nested(read(directory, name) or "")


def page_sizes(directory: str, suffix: str) -> list[str]:
    """The sizes of huge pages that a hugetlb directory has files for, the largest first.

    Args:
        directory: the cgroup's, in the hierarchy with the hugetlb controller.
        suffix: how the name of the file to look for ends: ``.current``, ``.usage_in_bytes``.

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
    units = ("KB", "MB", "GB")
    value = to_number(size[:-2]) or 0
    return (units.index(size[-2:]), value) if size[-2:] in units else (-1, value)


def rdma(directory: str, name: str) -> list[tuple[str, int, int]]:
    """The entries of an rdma file: device, handles and objects of each.

    ``max`` is the largest number of 32 bits, which the field in the message has.
    """
    most = 2**32 - 1
    entries = []
    for device, pairs in nested(directory, name):
        handles = to_number(pairs.get("hca_handle", "0"), unlimited=most)
        objects = to_number(pairs.get("hca_object", "0"), unlimited=most)
        entries.append((device, min(handles or 0, most), min(objects or 0, most)))
    return entries
