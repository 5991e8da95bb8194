"""The program that runs in the containers: where it is, and what it says (``probe.c``)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from integration.tree import PROBE, own_tree, probe_of
from integration.verify.errors import ProbeMissing

END: Final = "end"
"""Its last line of a look."""

Number = tuple[int, int]
"""The major and the minor number of a device."""

_CHECKOUT: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@dataclass(frozen=True, slots=True)
class Report:
    """What a container sees."""

    # the character devices below its /dev: number and errno of an attempt to open it, 0 for
    # success, by path
    nodes: dict[str, tuple[Number, int]] = field(default_factory=dict)
    # the errno of opening a device by its number alone. What is not here could not even be made.
    numbers: dict[Number, int] = field(default_factory=dict)
    mounts: frozenset[str] = frozenset()  # the names of what is mounted, without their directories


def find_program() -> str:
    """Where the program is.

    Raises:
        ProbeMissing: it is not there.
    """
    tree = own_tree()
    path = probe_of(tree) if tree else f"{_CHECKOUT}/.cache/bin/{PROBE}"
    if not os.access(path, os.X_OK):
        raise ProbeMissing("the program for the containers", found=f"no {path}")
    return path


def parse(lines: Iterable[str]) -> Report:
    """What it has said; lines of other kinds are left out.

    Raises:
        ValueError: a line is not as the program writes it.
    """
    nodes: dict[str, tuple[Number, int]] = {}
    numbers: dict[Number, int] = {}
    mounts = set()
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
    return Report(nodes, numbers, frozenset(mounts))


def _number(text: str) -> Number:
    major, _, minor = text.partition(":")
    return int(major), int(minor)
