"""The files by which a Tegra machine lists what containers get of its driver.

Lines of ``KIND, PATH``; what is behind the first comma is the path, commas and all:

========  ==========================================================================
``dev``   a device node; a path without a slash in front is below /dev
``lib``   a file, with all links followed: nearly always a library
``dir``   a directory
``sym``   a symbolic link, which is made, and what it leads to
========  ==========================================================================

Rules
- Blank lines and those that begin with ``#`` do not count, nor spaces around kind and path.
- A path may have the wildcards ``*``, ``?`` and ``[…]``, none of which stands for a slash.
- A line of no such form is left out and noted: NVIDIA's toolkit passes over it too.
- ``devices.csv``, ``drivers.csv`` and ``l4t.csv`` are for every container; the others are for
  those that say NVIDIA_REQUIRE_JETPACK=csv-mounts=all.

Source: NVIDIA Container Toolkit, internal/platform-support/tegra/csv; NVIDIA's documentation of
the container runtime on Jetson.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hooks.node.witness import read_names, read_text

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BASE_FILES", "Entry", "Kind", "parse", "read_files"]

BASE_FILES: Final = frozenset({"devices.csv", "drivers.csv", "l4t.csv"})


class Kind:
    """The words a line may begin with."""

    DEVICE: Final = "dev"
    LIBRARY: Final = "lib"
    DIRECTORY: Final = "dir"
    LINK: Final = "sym"


_KINDS: Final = frozenset({Kind.DEVICE, Kind.LIBRARY, Kind.DIRECTORY, Kind.LINK})


@dataclass(frozen=True, slots=True)
class Entry:
    """One line.

    Attributes:
        kind: of :class:`Kind`.
        path: absolute and normal, maybe with wildcards.
    """

    kind: str
    path: str


def parse(text: str, name: str) -> tuple[list[Entry], list[str]]:
    """The lines of a file.

    Args:
        text: its content.
        name: its name, for people.

    Returns:
        The entries, and notes on lines that are none.
    """
    entries, notes = [], []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        kind, _, path = (part.strip() for part in stripped.partition(","))
        if kind == Kind.DEVICE and path and not path.startswith("/"):
            path = f"/dev/{path}"
        if kind not in _KINDS or not path.startswith("/") or "\0" in path:
            notes.append(f"{name}, line {number}, is left out: it is no KIND, /PATH")
            continue
        # normpath keeps two leading slashes, which POSIX lets mean something else
        entries.append(Entry(kind, "/" + posixpath.normpath(path).lstrip("/")))
    return entries, notes


def read_files(directory: str, *, every: bool) -> Iterator[tuple[str, str]]:
    """The files of a directory that count.

    Args:
        directory: on the host.
        every: whether all do, and not those for every container only.

    Yields:
        Names and contents, in order of the names.
    """
    for name in read_names(directory) or ():
        if name.endswith(".csv") and (every or name in BASE_FILES):
            text = read_text(posixpath.join(directory, name))
            if text is not None:
                yield name, text
