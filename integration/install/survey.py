"""The state of an installation as one value."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from integration.containers import tree_users
from integration.install import usage
from integration.install.trees import known_tree
from integration.install.usage import Role, User
from integration.install_layout import (
    CURRENT,
    NODE_LOCK,
    PREVIOUS,
    STAGING,
    InstallLayout,
    is_directory_name,
    is_leftover_name,
    link_target,
    new_link,
    recorded_bindirs,
)
from integration.tree import Tree, own_tree
from shim.causes.agent import is_locked

_ENDING: Final = frozenset({Role.FORK_SERVER, Role.SPARE})


@dataclass(frozen=True, slots=True)
class Installed:
    """A tree below the prefix."""

    name: str  # its directory's name
    tree: Tree | None  # its description; None if it cannot be read
    placed: int = 0  # when it got its name, in nanoseconds since 1970
    users: tuple[User, ...] = ()  # the processes that use it
    problem: str = ""  # what is wrong with its files; empty if nothing is, or if not verified

    @property
    def holders(self) -> tuple[User, ...]:
        """The processes that keep it from being removed: all but fork servers, which we stop."""
        return tuple(user for user in self.users if user.role not in _ENDING)

    @property
    def shims(self) -> tuple[User, ...]:
        """The shims among its users."""
        return tuple(user for user in self.users if user.role is Role.SHIM)


@dataclass(frozen=True, slots=True)
class Link:
    """A link that should point to the current tree."""

    path: str
    expected: str  # the right target
    target: str  # the actual target; empty if it is not a link
    ours: bool  # whether the path is free, or a link into the prefix

    @property
    def is_right(self) -> bool:
        """Whether it points to the right target."""
        return self.target == self.expected


@dataclass(frozen=True, slots=True)
class Survey:
    """The state of an installation."""

    layout: InstallLayout
    installed: tuple[Installed, ...] = ()  # the trees, oldest first
    current: str = ""  # the current tree's name; empty if there is none
    previous: str = ""  # the previous tree's name; empty if there is none
    links: tuple[Link, ...] = ()  # those in the links' directory, and further ones
    # the recorded directories of links by the record's name; empty if no link is left in one
    recorded: Mapping[str, str] = field(default_factory=dict)
    # which of current and previous are links to trees; a tree may be missing
    pointers: tuple[str, ...] = (CURRENT, PREVIOUS)
    leftovers: tuple[str, ...] = ()  # paths left by killed installers
    foreign: tuple[str, ...] = ()  # names below the prefix that we did not create
    may_miss_shims: bool = False  # whether there may be shims that we cannot see

    def named(self, name: str) -> Installed | None:
        """Return the tree of that name; None if there is none."""
        return next((each for each in self.installed if each.name == name), None)


def take_survey(
    layout: InstallLayout,
    *,
    check: Callable[[str], str] | None = None,
    proc: str = usage.PROC,
    sockets: str = usage.SOCKETS,
    lock: str = NODE_LOCK,
) -> Survey:
    """Survey an installation.

    Args:
        layout: the installation's directories.
        check: returns the problem of the tree at a path; by default trees are not verified.
        proc: the procfs to read.
        sockets: the directory in which shims listen.
        lock: the file that Kubernetes' installer locks.
    """
    names = _names(layout.prefix)
    left = {name for name in names if is_leftover_name(name)}
    if STAGING in names and not _is_staging_in_use(layout.path(STAGING), lock):
        left.add(STAGING)
    links = tuple(_link(path, expected, layout.prefix) for path, expected in layout.links.items())
    leftovers = [layout.path(name) for name in sorted(left)]
    leftovers += [stray for link in links if os.path.islink(stray := new_link(link.path))]
    known = {CURRENT, PREVIOUS, *recorded_bindirs(layout.prefix)}
    others = [name for name in names if name not in left | known]
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
        pointers=tuple(name for name in (CURRENT, PREVIOUS) if _is_pointer(layout, name)),
        links=links,
        recorded={
            name: directory if InstallLayout(layout.prefix, directory).right_links() else ""
            for name, directory in recorded_bindirs(layout.prefix).items()
        },
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
    """Return the name of the tree that a link points to; empty if it points to none."""
    target = link_target(layout.path(link)).rstrip("/")
    name = os.path.basename(target)
    is_beside = target in {name, layout.path(name)}
    return name if name and is_beside and _is_directory(layout.path(name)) else ""


def _is_pointer(layout: InstallLayout, link: str) -> bool:
    """Return whether a link below the prefix has the name of a tree there as its target."""
    target = link_target(layout.path(link)).rstrip("/")
    name = os.path.basename(target)
    return is_directory_name(name) and target in {name, layout.path(name)}


def _link(path: str, expected: str, prefix: str) -> Link:
    target = link_target(path)
    resolved = os.path.normpath(os.path.join(os.path.dirname(path), target)) if target else ""
    ours = resolved.startswith(prefix + "/") if target else not os.path.lexists(path)
    return Link(path, expected, target, ours)


def _is_staging_in_use(path: str, lock: str) -> bool:
    """Return whether Kubernetes' installer may be writing it, or has started this program from it.

    An installer with another lock file is not seen; while it copies, it holds no other lock.
    """
    own = own_tree()
    # By their paths, because another command may be removing it.
    return is_locked(lock) or (bool(own) and os.path.realpath(own) == os.path.realpath(path))


def _is_directory(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False
