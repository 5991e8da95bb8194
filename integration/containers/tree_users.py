"""The processes that use an installed tree: they execute or map a file of it.

Rules
- A file counts by its device and inode, or by its path. A process in another mount namespace may
  have the tree at another path, and a process whose tree was renamed has the new path. A file at
  the same path inside a container is on another device.
- Everything comes from what the kernel prints. No file of a process is opened, because its file
  system may not answer.
- A process that may not be inspected, or a shim in a pid namespace that is invisible from here, may
  use any tree (:func:`is_blind`). A process that ends during the scan uses none.

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
from typing import Final

from api.ttrpc.sockets import peer_credentials
from integration.containers.procfs import Mapping, Procfs
from integration.install_layout import PROGRAMS
from shim.bundle import SHIM_PROGRAM, read_line
from shim.errors import BundleUnusable

Identity = tuple[str, int]

_SOCKET: Final = re.compile(r"[0-9a-f]{64}")
# Seconds for a listener that may be stopped.
_TO_ANSWER: Final = 0.2


@dataclass(frozen=True, slots=True)
class TreeUser:
    """A process that uses trees."""

    pid: int
    trees: tuple[str, ...]  # their directories
    words: list[str]  # the command line; empty unless it is root's, since others can pretend
    procfs: Procfs

    def cleanup_program(self) -> str:
        """Return the program with which containerd cleans up after a shim; "" if unknown.

        containerd writes its path into the bundle, which is the shim's working directory.
        """
        bundle = self.procfs.link(self.pid, "cwd")
        if self.procfs.is_contained(self.pid) or not bundle or not self.procfs.is_local(bundle):
            return ""
        with suppress(BundleUnusable):
            return read_line(os.path.join(bundle, SHIM_PROGRAM))
        return ""


def tree_users(trees: Iterable[str], proc: str = "/proc") -> list[TreeUser]:
    """Return the processes that use trees, in the order of their pids."""
    ours = Procfs()
    known = {tree: _TreeFiles.of(tree, ours) for tree in trees}
    procfs = Procfs(proc)
    found = []
    for pid in procfs.pids_by_trust():
        used = _used(procfs, pid, known)
        # A process that is exiting looks as if it hid its files.
        if used and not _has_ended(procfs, pid):
            words = procfs.words(pid) if procfs.owner(pid) == 0 else []
            found.append(TreeUser(pid, tuple(used), words, procfs))
    return sorted(found, key=lambda user: user.pid)


def _has_ended(procfs: Procfs, pid: int) -> bool:
    status = procfs.status(pid)
    return procfs.owner(pid) is None or (status is not None and status.is_zombie)


def is_blind(sockets: str, proc: str = "/proc") -> bool:
    """Whether there may be shims that are invisible from here.

    Without ``hostPID``, a container sees the sockets of the node's shims but not their pid
    namespace. Without all of root's capabilities, a process cannot read that directory, and sees
    only the command line of other processes.

    Args:
        sockets: the directory in which shims listen.
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
        procfs.hides_program(pid)
        and any(name in word for word in procfs.words(pid) for name in PROGRAMS)
        for pid in procfs.pids()
    )


def _has_unseen_listener(path: str) -> bool:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_TO_ANSWER)
            probe.connect(path)
            # The kernel prints the pid of the listener, dead or alive, as seen in our pid
            # namespace, or 0 if it has no pid there.
            return peer_credentials(probe).pid == 0
    except (BlockingIOError, PermissionError, TimeoutError):
        return True  # there may be one; a full queue means that it is busy
    except OSError:
        return False  # the listener has exited


@dataclass(frozen=True, slots=True)
class _TreeFiles:
    """What identifies the files of a tree."""

    below: tuple[str, ...]  # prefixes of their paths: as given, and as the kernel prints them
    own: frozenset[Identity]  # device and inode of each
    devices: frozenset[str]  # their devices, from stat(2) and from mountinfo

    @classmethod
    def of(cls, tree: str, ours: Procfs) -> _TreeFiles:
        """Read a tree.

        Args:
            ours: a procfs in which this process is visible.
        """
        devices = frozenset(_devices(tree, ours))
        inodes = _inodes(tree)
        return cls(
            (f"{tree}/", f"{os.path.realpath(tree)}/"),
            frozenset((device, inode) for device in devices for inode in inodes),
            devices,
        )

    def has(self, file: Mapping, *, is_here: bool) -> bool:
        """Whether a file belongs, or may belong, to the tree.

        Args:
            is_here: whether the process is in our mount namespace.
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
        # On some file systems (Btrfs, overlay), mountinfo and maps print another device.
        if (file := ours.open_file("self", str(fd))) is not None:
            yield from (m.device for m in ours.known_mounts() if m.id == file.mount)
    finally:
        os.close(fd)


def _inodes(tree: str) -> set[int]:
    """Return the inodes of all files that a process could execute or map."""
    found = set()
    for folder, _, names in os.walk(tree):
        for name in names:
            with suppress(OSError):
                status = os.lstat(os.path.join(folder, name))
                if stat.S_ISREG(status.st_mode):
                    found.add(status.st_ino)
    return found


def _used(procfs: Procfs, pid: int, known: dict[str, _TreeFiles]) -> list[str]:
    """Return the trees of which a process executes or maps a file."""
    is_here = procfs.sees_our_mounts(pid)
    files = procfs.mappings(pid)
    if is_here:
        # A program that was unmapped after it started leaves only its path.
        files.append(Mapping("", "", 0, procfs.program(pid)))
    return [
        tree for tree, its in known.items() if any(its.has(file, is_here=is_here) for file in files)
    ]
