"""The processes that use a tree, and their roles: shims, fork servers, and others.

A process uses a tree if it executes or maps one of the tree's files
(:mod:`integration.containers.tree_users`). Its command line decides its role, and counts only for
processes of root.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from integration.containers.shims import FORK_SERVER, SPARE_FLAG
from integration.containers.tree_users import tree_users
from integration.install_layout import SHIM

PROC: Final = "/proc"
SOCKETS: Final = "/run/containerd/s"

_VERBS: Final = frozenset({"start", "delete"})


class Role(StrEnum):
    """What a process does with a tree."""

    SHIM = "shim"
    FORK_SERVER = "fork server"
    SPARE = "spare"  # a fork server forked it; it exits with that server, or becomes a shim
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class User:
    """A process that uses a tree."""

    pid: int
    role: Role
    tree: str  # the tree's directory
    # of a shim, the path of the program that containerd runs to clean up after it; "" if unknown
    asked_by: str = ""


def users(trees: Iterable[str], *, proc: str = PROC) -> list[User]:
    """Return the processes that use trees.

    Returns:
        One entry for each process and tree, by pid.
    """
    found = []
    for user in tree_users(trees, proc):
        role = role_of(user.words)
        asked_by = user.cleanup_program() if role is Role.SHIM else ""
        found += [User(user.pid, role, tree, asked_by) for tree in user.trees]
    return found


def role_of(words: list[str]) -> Role:
    """Return the role of a process by its command line."""
    if not words or os.path.basename(words[0]).removesuffix(".py") != SHIM:
        return Role.OTHER
    if words[-1] == FORK_SERVER:
        return Role.SPARE if SPARE_FLAG in words else Role.FORK_SERVER
    return Role.SHIM if "-id" in words and words[-1] not in _VERBS else Role.OTHER
