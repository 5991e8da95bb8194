"""Find the probe (``probe.c``), which runs in the containers, and parse its reports."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from integration.tree import PROBE, own_tree, probe_of
from integration.verify.errors import ProbeMissing

END: Final = "end"
"""The last line of a report."""

Number = tuple[int, int]
"""A device's major and minor number."""

_CHECKOUT: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@dataclass(frozen=True, slots=True)
class Report:
    """The devices and mounts that a container sees."""

    # by path, each character device below /dev: its number, and the errno of opening it (0: ok)
    nodes: dict[str, tuple[Number, int]] = field(default_factory=dict)
    # by number, the errno of opening a device through a node that the probe created; numbers whose
    # node could not be created are missing
    numbers: dict[Number, int] = field(default_factory=dict)
    mounts: frozenset[str] = frozenset()  # the last components of the mount points
    files: frozenset[str] = frozenset()  # libraries of the driver where the shim puts them


def find_program() -> str:
    """Return the probe's path on the host.

    Raises:
        ProbeMissing: the probe is not installed.
    """
    tree = own_tree()
    path = probe_of(tree) if tree else f"{_CHECKOUT}/.cache/bin/{PROBE}"
    if not os.access(path, os.X_OK):
        raise ProbeMissing("to find the probe program", found=f"{path} does not exist")
    return path


def parse(lines: Iterable[str]) -> Report:
    """Parse the lines of a report; skip lines of unknown kinds.

    Raises:
        ValueError: a line is malformed.
    """
    nodes: dict[str, tuple[Number, int]] = {}
    numbers: dict[Number, int] = {}
    mounts, files = set(), set()
    for line in lines:
        kind, *words = line.split(" ")
        if kind == "node":
            path, number, errno = words
            nodes[path] = (_number(number), int(errno))
        elif kind == "number":
            number, errno = words
            numbers[_number(number)] = int(errno)
        elif kind == "mount":
            mounts.add(" ".join(words))
        elif kind == "file":
            files.add(" ".join(words))
    return Report(nodes, numbers, frozenset(mounts), frozenset(files))


def _number(text: str) -> Number:
    major, _, minor = text.partition(":")
    return int(major), int(minor)
