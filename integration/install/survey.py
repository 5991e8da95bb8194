"""What is there of an installation now, as one value."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from integration.containers import tree_users
from integration.install import usage
from integration.install.trees import known_tree
from integration.install.usage import Role, User
from integration.install_layout import (
    CURRENT,
    PREVIOUS,
    InstallLayout,
    is_directory_name,
    is_leftover_name,
    new_link,
)
from integration.tree import Tree

_ENDING: Final = frozenset({Role.FORK_SERVER, Role.SPARE})


@dataclass(frozen=True, slots=True)
class Installed:
    """A tree below the prefix."""

    name: str  # of its directory
    tree: Tree | None  # what it says of itself; None if it says nothing that can be read
    placed: int = 0  # when it got its name, in nanoseconds since 1970
    users: tuple[User, ...] = ()  # the processes that use it
    problem: str = ""  # what is wrong with its files; empty if nothing is, or nobody has looked

    @property
    def holders(self) -> tuple[User, ...]:
        """Who keeps it from being removed: all but fork servers, which end when they are told."""
        return tuple(user for user in self.users if user.role not in _ENDING)

    @property
    def shims(self) -> tuple[User, ...]:
        """The shims among its users."""
        return tuple(user for user in self.users if user.role is Role.SHIM)


@dataclass(frozen=True, slots=True)
class Link:
    """A link that leads to the tree in effect, or should."""

    path: str  # where it is
    expected: str  # where it should lead
    target: str  # where it leads; empty if there is nothing
    ours: bool  # whether there is nothing, or a link into the prefix

    @property
    def is_right(self) -> bool:
        """Whether it leads where it should."""
        return self.target == self.expected


@dataclass(frozen=True, slots=True)
class Survey:
    """An installation as it is."""

    layout: InstallLayout  # where
    installed: tuple[Installed, ...] = ()  # the trees, the oldest first
    current: str = ""  # the name of the tree in effect; empty if none is
    previous: str = ""  # the name of the one before; likewise
    links: tuple[Link, ...] = ()  # those of the directory of links
    leftovers: tuple[str, ...] = ()  # paths of what installers have left that were killed
    foreign: tuple[str, ...] = ()  # names below the prefix that no installer makes
    may_miss_shims: bool = False  # whether there may be shims that are not seen

    def named(self, name: str) -> Installed | None:
        """The tree in a directory; None if there is none of that name."""
        return next((each for each in self.installed if each.name == name), None)


def take_survey(
    layout: InstallLayout,
    *,
    check: Callable[[str], str] | None = None,
    proc: str = usage.PROC,
    sockets: str = usage.SOCKETS,
) -> Survey:
    """Look at an installation.

    Args:
        place: where.
        check: says of a tree's path what is wrong with its files; by default nobody looks.
        proc: where procfs is.
        sockets: where shims listen.
    """
    names = _names(layout.prefix)
    links = tuple(_link(path, expected, layout.prefix) for path, expected in layout.links.items())
    leftovers = [layout.path(name) for name in names if is_leftover_name(name)]
    leftovers += [stray for link in links if os.path.islink(stray := new_link(link.path))]
    others = [n for n in names if not is_leftover_name(n) and n not in {CURRENT, PREVIOUS}]
    current, previous = (_tree_that(layout, name) for name in (CURRENT, PREVIOUS))
    directories = [
        name
        for name in others
        if name in {current, previous}
        or (is_directory_name(name) and _is_directory(layout.path(name)))
    ]
    paths = [layout.path(name) for name in directories]
    found = usage.users(paths, proc=proc)
    installed = [
        Installed(
            name=name,
            tree=known_tree(path),
            placed=os.lstat(path).st_ctime_ns,
            users=tuple(user for user in found if user.tree == path),
            problem=check(path) if check else "",
        )
        for name, path in zip(directories, paths, strict=True)
    ]
    return Survey(
        layout=layout,
        installed=tuple(sorted(installed, key=lambda each: (each.placed, each.name))),
        current=current,
        previous=previous if previous != current else "",
        links=links,
        leftovers=tuple(leftovers),
        foreign=tuple(name for name in others if name not in directories),
        may_miss_shims=tree_users.is_blind(sockets, proc),
    )


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _tree_that(layout: InstallLayout, link: str) -> str:
    """The name of the tree that a link below the prefix leads to; empty if to none."""
    target = _target(layout.path(link)).rstrip("/")
    name = os.path.basename(target)
    is_beside = target in {name, layout.path(name)}
    return name if name and is_beside and _is_directory(layout.path(name)) else ""


def _link(path: str, expected: str, prefix: str) -> Link:
    target = _target(path)
    resolved = os.path.normpath(os.path.join(os.path.dirname(path), target)) if target else ""
    ours = resolved.startswith(prefix + "/") if target else not os.path.lexists(path)
    return Link(path, expected, target, ours)


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _is_directory(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False
