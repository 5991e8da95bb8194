"""The operations on an installation. Each is done completely, or not at all.

Every step can be repeated if an earlier run was killed before or during it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Clear:
    """Remove what a killed installer left behind."""

    path: str

    def __str__(self) -> str:
        return f"remove {self.path}, which an interrupted installation left"


@dataclass(frozen=True, slots=True)
class Put:
    """Copy a tree below the prefix, verify it, and rename it to its name."""

    source: str
    name: str

    def __str__(self) -> str:
        return f"copy {self.source} to {self.name} and verify it"


@dataclass(frozen=True, slots=True)
class Test:
    """Start a container through a tree; remove the tree if that fails and it is new."""

    name: str
    new: bool

    __test__ = False  # not a pytest test

    def __str__(self) -> str:
        return f"start a container through {self.name}"


@dataclass(frozen=True, slots=True)
class Point:
    """Point a link below the prefix at a tree."""

    link: str
    name: str

    def __str__(self) -> str:
        return f"point {self.link} at {self.name}"


@dataclass(frozen=True, slots=True)
class Link:
    """Point a link in the links' directory at the current tree."""

    path: str
    target: str

    def __str__(self) -> str:
        return f"link {self.path} to {self.target}"


@dataclass(frozen=True, slots=True)
class Unlink:
    """Remove a link."""

    path: str

    def __str__(self) -> str:
        return f"remove the link {self.path}"


@dataclass(frozen=True, slots=True)
class EndForkServers:
    """Tell the fork servers of trees to exit; shims are not their children."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"stop the fork servers of {', '.join(self.names)}"


@dataclass(frozen=True, slots=True)
class Collect:
    """Remove a tree, unless a process uses it."""

    name: str

    def __str__(self) -> str:
        return f"remove {self.name} if nothing uses it"


@dataclass(frozen=True, slots=True)
class RemovePrefix:
    """Remove the prefix if it is empty."""

    path: str

    def __str__(self) -> str:
        return f"remove {self.path} if it is empty"


Step: TypeAlias = (
    Clear | Put | Test | Point | Link | Unlink | EndForkServers | Collect | RemovePrefix
)
