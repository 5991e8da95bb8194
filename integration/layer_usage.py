"""Measure how much disk space the shared layers of containers take.

In a layer, a file of the driver is either a copy or a hard link to the host's file, which takes no
space while the host has the file (:mod:`shim.work.driver_files`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from shim.work import driver_files, layers


@dataclass(frozen=True, slots=True)
class LayerUsage:
    """The layers of a node and their space."""

    directory: str
    layers: int  # how many
    linked_bytes: int  # files of the driver that are links to the host's: no space
    copied_bytes: int  # copies or clones of the driver's files
    other_bytes: int  # other files: loader caches, and files of drivers that the host has removed

    def to_json(self) -> dict[str, Any]:
        """Return plain values for output."""
        return asdict(self)


def layer_usage(directory: str, sources: Iterable[str]) -> LayerUsage:
    """Measure the layers in a directory.

    Args:
        directory: the directory of the layers; it may be missing.
        sources: the driver's files on the host.
    """
    host = dict(_sized(sources))
    copies = dict(_sized(_files(os.path.join(directory, driver_files.STORE))))
    names = [name for name in _names(directory) if layers.is_name(name) and name[0] != "."]
    found = dict(_sized(path for name in names for path in _files(os.path.join(directory, name))))
    return LayerUsage(
        directory,
        len(names),
        linked_bytes=sum(size for key, size in found.items() if key in host),
        copied_bytes=sum(copies.values()),
        other_bytes=sum(size for key, size in found.items() if key not in host | copies),
    )


def _sized(paths: Iterable[str]) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield the device and inode of each regular file, and its size on disk."""
    for path in paths:
        with suppress(OSError):
            seen = os.lstat(path)
            if stat.S_ISREG(seen.st_mode):
                yield (seen.st_dev, seen.st_ino), seen.st_blocks * 512


def _files(directory: str) -> Iterator[str]:
    for above, _, names in os.walk(directory):
        yield from (os.path.join(above, name) for name in names)


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
