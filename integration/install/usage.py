"""Which processes use which tree: shims, fork servers, and whatever else has files of one.

A process uses a tree if it executes or maps a file of it: its interpreter's loader, or a library.
Files are told by their path, and by device and inode: a process in another mount namespace may see
them elsewhere, and one whose tree was renamed sees them where they are now. A container can have
files under the same path; they are on another device. What a process says that it is counts only if
it is root's. All of that is what the kernel prints: no file of a process is asked for, since that
may be on a file system whose server is gone.

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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from api.ttrpc.sockets import peer_credentials
from integration.containers.procfs import Mapping, Procfs
from integration.install_places import PROGRAMS, SHIM

if TYPE_CHECKING:
    Identity = tuple[str, int]

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
    ours = Procfs()
    known = {tree: _Known.of(tree, ours) for tree in trees}
    procfs = Procfs(proc)
    found = []
    # Those in containers come last: they can make it take long, and then are not read any more.
    for pid in sorted(procfs.pids(), key=procfs.is_contained):
        used = _used(procfs, pid, known)
        # One that ends meanwhile looks as if it hid what it has.
        if not used or _has_ended(procfs, pid):
            continue
        role = role_of(procfs.words(pid)) if procfs.owner(pid) == 0 else Role.OTHER
        asked_by = _asked_by(procfs, pid) if role is Role.SHIM else ""
        found += [User(pid, role, tree, asked_by) for tree in used]
    return sorted(found, key=lambda user: user.pid)


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
class _Known:
    """What the files of a tree are known by."""

    below: tuple[str, ...]  # how their paths begin, as they are given and as the kernel tells them
    own: frozenset[Identity]  # what they are
    devices: frozenset[str]  # that they are on, as stat(2) and as the kernel tells it

    @classmethod
    def of(cls, tree: str, ours: Procfs) -> _Known:
        """Look at a tree.

        Args:
            ours: where this process is shown.
        """
        devices = frozenset(_devices(tree, ours))
        inodes = _inodes(tree)
        return cls(
            (f"{tree}/", f"{os.path.realpath(tree)}/"),
            frozenset((device, inode) for device in devices for inode in inodes),
            devices,
        )

    def has(self, file: Mapping, *, is_here: bool) -> bool:
        """Whether a file is the tree's, or may be.

        Args:
            is_here: whether paths mean for the process what they mean for us.
        """
        if (file.device, file.inode) in self.own:
            return True
        return file.path.startswith(self.below) and (
            is_here or not self.devices or file.device in self.devices
        )


def _devices(tree: str, ours: Procfs) -> Iterator[str]:
    try:
        fd = os.open(tree, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        device = os.fstat(fd).st_dev
        yield f"{os.major(device)}:{os.minor(device)}"
        # On some file systems (Btrfs, overlay) it is not that of mountinfo and maps.
        if (file := ours.open_file("self", str(fd))) is not None:
            yield from (m.device for m in ours.known_mounts() if m.id == file.mount)
    finally:
        os.close(fd)


def _inodes(tree: str) -> set[int]:
    """The inode of every file that could be executed or mapped."""
    found = set()
    for folder, _, names in os.walk(tree):
        for name in names:
            with suppress(OSError):
                status = os.lstat(os.path.join(folder, name))
                if stat.S_ISREG(status.st_mode):
                    found.add(status.st_ino)
    return found


def _used(procfs: Procfs, pid: int, known: dict[str, _Known]) -> list[str]:
    """The trees of which a process executes or maps a file."""
    is_here = procfs.sees_our_mounts(pid)
    files = procfs.mappings(pid)
    if is_here:
        # A program that a process has unmapped has its path alone.
        files.append(Mapping("", "", 0, procfs.link(pid, "exe")))
    return [
        tree for tree, its in known.items() if any(its.has(file, is_here=is_here) for file in files)
    ]


def _asked_by(procfs: Procfs, pid: int) -> str:
    """The program that containerd has noted in the bundle, which is the shim's directory."""
    path = os.path.join(procfs.link(pid, "cwd"), _ASKED_BY)
    if procfs.is_contained(pid) or not procfs.is_local(path):
        return ""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return os.fsdecode(os.read(fd, _LONGEST_PATH)).strip()
        finally:
            os.close(fd)
    return ""
