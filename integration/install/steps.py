"""What can be done to an installation: each step whole, or not at all.

Every step can be taken again after a run that ended before or in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Clear:
    """Remove what a killed installer has left."""

    path: str

    def __str__(self) -> str:
        return f"remove {self.path}, which an interrupted installation left"


@dataclass(frozen=True, slots=True)
class Put:
    """Copy a tree below the prefix, verify it, and give it its name."""

    source: str
    name: str

    def __str__(self) -> str:
        return f"copy {self.source} to {self.name} and verify it"


@dataclass(frozen=True, slots=True)
class Test:
    """Start a container through a tree; remove the tree if that fails and it is new."""

    name: str
    new: bool

    __test__ = False  # it is no test of pytest's

    def __str__(self) -> str:
        return f"start a container through {self.name}"


@dataclass(frozen=True, slots=True)
class Point:
    """Let a link below the prefix lead to a tree."""

    link: str
    name: str

    def __str__(self) -> str:
        return f"let {self.link} lead to {self.name}"


@dataclass(frozen=True, slots=True)
class Link:
    """Let a link in the directory of links lead to the tree in effect."""

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
    """Tell the fork servers of trees to end; shims are not their children."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"end the fork servers of {', '.join(self.names)}"


@dataclass(frozen=True, slots=True)
class Collect:
    """Remove a tree, unless a process uses it by then."""

    name: str

    def __str__(self) -> str:
        return f"remove {self.name} if nothing uses it"


@dataclass(frozen=True, slots=True)
class RemovePrefix:
    """Remove the prefix if nothing is left in it."""

    path: str

    def __str__(self) -> str:
        return f"remove {self.path} if it is empty"


Step: TypeAlias = (
    Clear | Put | Test | Point | Link | Unlink | EndForkServers | Collect | RemovePrefix
)
