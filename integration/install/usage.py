"""Which processes use which tree: shims, fork servers, and whatever else has files of one.

A process uses a tree if it executes or maps a file of it: its interpreter's loader, or a library.
Files are told by their path, and by device and inode: a process in another mount namespace may see
them elsewhere, and one whose tree was renamed sees them where they are now. A container can have
files under the same path; they are on another device. What a process says that it is counts only if
it is root's.

A tree that cannot be ruled out counts as used: a process that cannot be looked at (it has gone) is
no reason, but one that may not be looked at, or a shim in a pid namespace that is not seen from
here, is (:func:`is_blind`).

Source: proc(5), /proc/PID/maps and exe; unix(7), SO_PEERCRED.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from api.ttrpc.sockets import peer_credentials
from integration.inspection.procfs import Procfs
from integration.install.places import PROGRAMS, SHIM

if TYPE_CHECKING:
    Identity = tuple[int, int]

PROC: Final = "/proc"
SOCKETS: Final = "/run/containerd/s"

_FORK_SERVER: Final = "fork-server"
_SPARE: Final = "-spare"
_VERBS: Final = frozenset({"start", "delete"})
_ASKED_BY: Final = "shim-binary-path"
_SOCKET: Final = re.compile(r"[0-9a-f]{64}")
_LONGEST_PATH: Final = 4096
# Seconds for a listener that may be stopped.
_PATIENCE: Final = 0.2


class Role(StrEnum):
    """What a process does with a tree."""

    SHIM = "shim"
    FORK_SERVER = "fork server"
    SPARE = "spare"  # forked by a fork server, with which it ends; or about to become a shim
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class User:
    """A process that uses a tree."""

    pid: int  # the process
    role: Role  # what it does
    tree: str  # the tree's directory
    # of a shim, the path of the program that containerd executes to clean up after it; empty if
    # that is not known
    asked_by: str = ""


def users(trees: Iterable[str], *, proc: str = PROC) -> list[User]:
    """The processes that use trees.

    Returns:
        One for each process and tree, in the order of their pids.
    """
    known = {tree: _Known.of(tree) for tree in trees}
    procfs = Procfs(proc)
    found = []
    for pid in procfs.pids():
        files = _files(procfs, pid)
        for tree, its in known.items():
            # One that ends meanwhile looks as if it hid what it has.
            if any(map(its.has, files)) and not _has_ended(procfs, pid):
                # Not of others: to read the words of a process can take as long as it wants.
                role = role_of(procfs.words(pid)) if procfs.owner(pid) == 0 else Role.OTHER
                asked_by = _asked_by(f"{proc}/{pid}/cwd") if role is Role.SHIM else ""
                found.append(User(pid, role, tree, asked_by))
    return found


def _has_ended(procfs: Procfs, pid: int) -> bool:
    status = procfs.status(pid)
    return procfs.owner(pid) is None or (status is not None and status.is_zombie)


def role_of(words: list[str]) -> Role:
    """What a process does, by its command line.

    Args:
        words: of the command line.
    """
    if not words or os.path.basename(words[0]).removesuffix(".py") != SHIM:
        return Role.OTHER
    if words[-1] == _FORK_SERVER:
        return Role.SPARE if _SPARE in words else Role.FORK_SERVER
    return Role.SHIM if "-id" in words and words[-1] not in _VERBS else Role.OTHER


def is_blind(sockets: str = SOCKETS, *, proc: str = PROC) -> bool:
    """Whether there may be shims that cannot be seen from here.

    A shim of the machine listens in a directory that this process sees although it does not see
    the shim's pid namespace, as in a container without ``hostPID``. Who has not all of root's
    capabilities may not look into that directory, nor see of a process more than its words.
    """
    try:
        names = os.listdir(sockets)
    except FileNotFoundError:
        names = []
    except OSError:
        return True
    shims = [os.path.join(sockets, name) for name in names if _SOCKET.fullmatch(name)]
    procfs = Procfs(proc)
    return any(map(_has_unseen_listener, shims)) or any(
        _is_closed(procfs, pid) for pid in procfs.pids()
    )


def _has_unseen_listener(path: str) -> bool:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PATIENCE)
            probe.connect(path)
            # The kernel names who has listened, dead or alive, by its pid in our namespace; 0 if
            # it has none there.
            return peer_credentials(probe).pid == 0
    except PermissionError:
        return True
    except OSError:
        return False  # nobody listens any more


def _is_closed(procfs: Procfs, pid: int) -> bool:
    """Whether a process that is one of ours by its words does not let us see its files."""
    try:
        os.readlink(f"{procfs.path}/{pid}/exe")
    except PermissionError:
        return any(name in word for word in procfs.words(pid) for name in PROGRAMS)
    except OSError:
        pass  # it has gone, or is the kernel's
    return False


@dataclass(frozen=True, slots=True)
class _File:
    """A file that a process executes or maps."""

    path: str  # as the kernel tells it
    identity: Identity  # likewise; on some file systems the device is not that which stat(2) tells
    link: str  # leads to it, in procfs


@dataclass(frozen=True, slots=True)
class _Known:
    """What the files of a tree are known by."""

    below: tuple[str, ...]  # how their paths begin, as they are given and as the kernel tells them
    own: frozenset[Identity]  # what they are
    device: int  # that they are on; -1 if that is not known

    @classmethod
    def of(cls, tree: str) -> _Known:
        """Look at a tree."""
        try:
            device = os.stat(tree).st_dev
        except OSError:
            device = -1
        return cls((f"{tree}/", f"{os.path.realpath(tree)}/"), _identities(tree), device)

    def has(self, file: _File) -> bool:
        """Whether a file is the tree's, or may be."""
        if file.identity in self.own:
            return True
        if not file.path.startswith(self.below):
            return False
        try:
            return self.device in {os.stat(file.link).st_dev, -1}
        except OSError:
            return True


def _identities(tree: str) -> frozenset[Identity]:
    """Device and inode of every file that could be executed or mapped."""
    found = set()
    for folder, _, names in os.walk(tree):
        for name in names:
            with suppress(OSError):
                status = os.lstat(os.path.join(folder, name))
                if stat.S_ISREG(status.st_mode):
                    found.add((status.st_dev, status.st_ino))
    return frozenset(found)


def _files(procfs: Procfs, pid: int) -> list[_File]:
    """The files that a process executes or maps."""
    found = set()
    folder = f"{procfs.path}/{pid}"
    if identity := procfs.identity(pid, "exe"):
        found.add(_File(procfs.link(pid, "exe"), identity, f"{folder}/exe"))
    for line in procfs.text(pid, "maps").splitlines():
        # address permissions offset device inode path
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[4] != "0":  # noqa: PLR2004 - as listed above
            major, _, minor = fields[3].partition(":")
            identity = (os.makedev(int(major, 16), int(minor, 16)), int(fields[4]))
            # Which is named without the zeros before it.
            begin, _, end = fields[0].partition("-")
            link = f"{begin.lstrip('0') or '0'}-{end.lstrip('0')}"
            found.add(_File(fields[5], identity, f"{folder}/map_files/{link}"))
    return list(found)


def _asked_by(bundle: str) -> str:
    """The program that containerd has noted in the bundle, which is the shim's directory."""
    with suppress(OSError):
        fd = os.open(f"{bundle}/{_ASKED_BY}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return os.fsdecode(os.read(fd, _LONGEST_PATH)).strip()
        finally:
            os.close(fd)
    return ""
