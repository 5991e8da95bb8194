"""Processes, as procfs shows them: what cannot be read of one that ends is empty.

Rules
- Nothing here waits for a file system of somebody else's. A link of a process (its working
  directory, program, open files) is read and never followed: what it leads to is told by what the
  kernel prints of it (fdinfo, mountinfo, maps).
- The kernel reads the memory of a process for some files. A process can make it wait there, so of
  one that is not the node's own (:meth:`Procfs.is_own`) a child reads these
  (:mod:`integration.containers.bounded_reader`). The child also asks which device a node is.
- There is a bound on everything that a process can have many of, and each is gone through once.
- What is known of a mount or network namespace is read once for each :class:`Procfs`.

Source: proc(5); namespaces(7).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from integration.containers.bounded_reader import Reader
from integration.memory import ROLLUP, read_rollup
from shim.mountinfo import is_served, leads_below, served_mount_points, unescape

# Fields of /proc/PID/stat after the program's name, which may have spaces and parentheses in it.
_STATE, _PARENT, _FLAGS, _THREADS, _START_TIME, _START_STACK = 0, 1, 6, 17, 19, 25
_PF_KTHREAD: Final = 0x00200000  # include/linux/sched.h
_ACCEPTS: Final = "00010000"  # SO_ACCEPTCON: the listener, and no connection made to it
_PATH_COLUMN, _INODE_COLUMN, _FLAGS_COLUMN = 7, 6, 3

DELETED: Final = " (deleted)"
"""How the kernel ends the name of what is not there any more."""

_MOST_DESCRIPTORS: Final = 1 << 14
_MOST_BYTES: Final = 64 << 20
# Files for which the kernel reads the memory of a process, or takes a lock of it; and how much of
# them is of use.
_OF_MEMORY: Final = {
    "cmdline": 1 << 17, "environ": 1 << 20, "maps": _MOST_BYTES, ROLLUP: 1 << 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Status:
    """What ``stat`` says of a process."""

    pid: int  # which
    parent: int  # the pid of its parent
    state: str  # one letter
    start_time: int  # in clock ticks since boot
    # the address where its stack begins: the same in processes that were forked from one another,
    # and random in others. 0 if it may not be known.
    stack: int
    threads: int = 1  # how many go on
    is_kernel: bool = False  # whether it is a thread of the kernel
    name: str = ""  # of its program, or what it calls itself; 15 bytes at most

    @property
    def is_zombie(self) -> bool:
        """Whether it has ended, and was not reaped yet; so looks one whose first thread has."""
        return self.state in {"Z", "X"} and self.threads <= 1

    @property
    def started_since_boot(self) -> float:
        """When it was started, in seconds since boot, which nobody sets; to a hundredth."""
        return self.start_time / os.sysconf("SC_CLK_TCK")

    @property
    def started(self) -> float:
        """When it was started, in seconds of the epoch."""
        boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return boot + self.started_since_boot

    @property
    def age(self) -> float:
        """Seconds since it was started."""
        return max(0.0, time.time() - self.started)


@dataclass(frozen=True, slots=True)
class Mount:
    """What is mounted somewhere."""

    device: str  # "MAJOR:MINOR" of the file system
    root: str  # which directory of that
    point: str  # where it is mounted
    kind: str  # of the file system
    source: str  # as the file system calls it
    options: tuple[str, ...]  # of the mount and of the file system
    id: int = 0  # of the mount; no other has it at the same time, in whatever namespace


@dataclass(frozen=True, slots=True)
class OpenFile:
    """What ``fdinfo`` says of a descriptor."""

    flags: int  # with which it was opened
    mount: int  # the id of the mount that it is on; 0 if that is not told
    inode: int  # 0 on a kernel before 5.14

    @property
    def is_place_only(self) -> bool:
        """Whether it only names a file, which nobody has opened by that."""
        return bool(self.flags & os.O_PATH)


@dataclass(frozen=True, slots=True)
class Mapping:
    """A file that is mapped into the memory of a process."""

    addresses: str  # as ``map_files`` names them
    device: str  # "MAJOR:MINOR" of the file system, in decimal as in mountinfo
    inode: int  # of the file
    path: str  # as the process sees it; one that is gone ends in " (deleted)"


class Procfs:
    """A procfs."""

    def __init__(self, path: str = "/proc") -> None:
        self.path = path
        self._texts, self._nodes = Reader(), Reader()
        self._homes: dict[str, frozenset[str]] = {}
        self._sockets: dict[str, dict[str, str]] = {}
        self._mounts: dict[str, list[Mount]] = {}
        self._served_by: dict[str, frozenset[int | str]] = {}
        self._served: frozenset[str] | None = None

    def pids(self) -> Iterator[int]:
        """The processes that are there."""
        yield from sorted(int(n) for n in os.listdir(self.path) if n.isdecimal() and n.isascii())

    def status(self, pid: int) -> Status | None:
        """What ``stat`` says of a process; None if it is gone."""
        before, _, rest = self.text(pid, "stat").rpartition(")")
        fields = rest.split()
        if len(fields) <= _START_STACK:
            return None
        return Status(
            pid=pid,
            parent=int(fields[_PARENT]),
            state=fields[_STATE],
            start_time=int(fields[_START_TIME]),
            stack=int(fields[_START_STACK]),
            threads=int(fields[_THREADS]),
            is_kernel=bool(int(fields[_FLAGS]) & _PF_KTHREAD),
            name=before.partition("(")[2],
        )

    def text(self, pid: int | str, name: str) -> str:
        """A file of a process; "" if it cannot be read."""
        path = f"{self.path}/{pid}/{name}"
        most = _OF_MEMORY.get(name, _MOST_BYTES)
        if name in _OF_MEMORY and pid != "self" and not self.is_own(int(pid)):
            return os.fsdecode(self._texts.text(path, most) or b"")
        try:
            with open(path, "rb") as file:
                return os.fsdecode(file.read(most))
        except OSError:
            return ""

    def is_own(self, pid: int) -> bool:
        """Whether a process is root's or the caller's, and sees the files that init or we do.

        Nobody else has given it its memory or its files.
        """
        return self.link(pid, "ns/mnt") in self._home("mnt") and (
            {0, os.geteuid()}.issuperset(self.users(pid) or [-1])
        )

    def is_contained(self, pid: int) -> bool:
        """Whether a process is in a container: it has mounts, and pids or users, of its own."""
        return self._is_elsewhere(pid, "mnt") and (
            self._is_elsewhere(pid, "pid") or self._is_elsewhere(pid, "user")
        )

    def sees_our_mounts(self, pid: int) -> bool:
        """Whether a process has our mount namespace, or that is not known."""
        return self.link(pid, "ns/mnt") in {"", _our_namespace("mnt")}

    def _is_elsewhere(self, pid: int, kind: str) -> bool:
        namespace = self.link(pid, f"ns/{kind}")
        return bool(namespace) and namespace not in self._home(kind)

    def _home(self, kind: str) -> frozenset[str]:
        """The namespaces of the node: that of its first process, and ours."""
        if kind not in self._homes:
            both = {self.link(1, f"ns/{kind}"), _our_namespace(kind)}
            self._homes[kind] = frozenset(both - {""})
        return self._homes[kind]

    def words(self, pid: int) -> list[str]:
        """Its command line, without the zeros at the end of one that was overwritten."""
        line = self.text(pid, "cmdline").rstrip("\0")
        return line.split("\0") if line else []

    def link(self, pid: int | str, name: str) -> str:
        """Where a link of a process leads, by name; "" if it cannot be read."""
        try:
            return os.readlink(f"{self.path}/{pid}/{name}")
        except OSError:
            return ""

    def users(self, pid: int) -> list[int]:
        """Its real, effective, saved and file system user; none if it is gone."""
        for line in self.text(pid, "status").splitlines():
            if line.startswith("Uid:"):
                return [int(word) for word in line.split()[1:]]
        return []

    def owner(self, pid: int) -> int | None:
        """Its effective user; None if it is gone."""
        return next(iter(self.users(pid)[1:]), None)

    def descriptors(self, pid: int) -> dict[str, str]:
        """What its open files are, by number: of very many, those with the lowest numbers."""
        try:
            with os.scandir(f"{self.path}/{pid}/fd") as entries:
                numbers = [entry.name for entry in islice(entries, _MOST_DESCRIPTORS)]
        except OSError:
            return {}
        return {number: self.link(pid, f"fd/{number}") for number in numbers}

    def open_file(self, pid: int | str, number: str) -> OpenFile | None:
        """What a descriptor is; None if it is closed by now."""
        lines = (line.partition(":") for line in self.text(pid, f"fdinfo/{number}").splitlines())
        told = {name: value.strip() for name, _, value in lines}
        try:
            flags = int(told["flags"], 8)
            return OpenFile(flags, int(told.get("mnt_id", 0)), int(told.get("ino", 0)))
        except (KeyError, ValueError):
            return None

    def has_open(self, pid: int, path: str) -> bool:
        """Whether it has a file open, wherever that is for it.

        Args:
            path: of a file of ours, which has its name everywhere.
        """
        name = os.path.basename(path)
        links = {
            number: link
            for number, link in self.descriptors(pid).items()
            if os.path.basename(link.removesuffix(DELETED)) == name
        }
        if not links:
            return False
        try:
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            inode, real = os.fstat(fd).st_ino, os.path.realpath(path)
            ours = Procfs().open_file("self", str(fd))
        finally:
            os.close(fd)
        alike = {
            file.mount
            for number, link in links.items()
            if (file := self.open_file(pid, number)) is not None
            # A kernel that does not tell the inode has the path alone.
            and (file.inode == inode if file.inode else link == real)
        }
        if not alike or ours is None:
            return False
        mounts = {m.id: m.device for each in ("self", pid) for m in self.mounts(each)}
        device = mounts.get(ours.mount)
        # A mount that is in neither namespace may be one of the past: of an agent before this one.
        return any(mounts.get(mount, device) == device for mount in alike)

    def listening(self, pid: int) -> set[str]:
        """The paths of the unix sockets that it listens on, as it named them."""
        own = [link for link in self.descriptors(pid).values() if link.startswith("socket:[")]
        if not own:
            return set()
        sockets = self._listeners(pid)
        return {sockets[link] for link in own if link in sockets}

    def _listeners(self, pid: int) -> dict[str, str]:
        """The sockets that processes listen on in a process's network namespace, with paths."""
        namespace = self.link(pid, "ns/net") or str(pid)
        if namespace not in self._sockets:
            found = self._sockets[namespace] = {}
            for line in self.text(pid, "net/unix").splitlines():
                columns = line.split(None, _PATH_COLUMN)
                # A socket without a path has one column less.
                if len(columns) > _PATH_COLUMN and columns[_FLAGS_COLUMN] == _ACCEPTS:
                    found[f"socket:[{columns[_INODE_COLUMN]}]"] = columns[_PATH_COLUMN]
        return self._sockets[namespace]

    def mappings(self, pid: int) -> list[Mapping]:
        """The parts of its memory that are mapped from files."""
        found = []
        for line in self.text(pid, "maps").splitlines():
            # address permissions offset device inode path
            words = line.split(maxsplit=5)
            if len(words) == 6 and words[4] != "0":  # noqa: PLR2004 - as listed above
                major, _, minor = words[3].partition(":")
                device = f"{int(major, 16)}:{int(minor, 16)}"
                # ``map_files`` has no zeros before addresses.
                begin, _, end = words[0].partition("-")
                addresses = f"{begin.lstrip('0') or '0'}-{end.lstrip('0')}"
                found.append(Mapping(addresses, device, int(words[4]), words[5]))
        return found

    def mapped(self, pid: int) -> list[str]:
        """The files that are mapped into its memory; one that is gone ends in " (deleted)"."""
        rows = (line.split(None, 5) for line in self.text(pid, "maps").splitlines())
        names = (row[5] for row in rows if len(row) > 5)  # noqa: PLR2004 - the last column
        return list(dict.fromkeys(name for name in names if name.startswith("/")))

    def mounts(self, pid: int | str = "self") -> list[Mount]:
        """What is mounted in its mount namespace, in the kernel's order."""
        found = []
        for line in os.fsencode(self.text(pid, "mountinfo")).splitlines():
            words = [os.fsdecode(unescape(word)) for word in line.split()]
            if "-" in words:
                end = words.index("-")
                options = {*words[5].split(","), *words[end + 3].split(",")}
                device, root, point, kind, source = *words[2:5], *words[end + 1 : end + 3]
                found.append(
                    Mount(device, root, point, kind, source, tuple(sorted(options)), int(words[0]))
                )
        return found

    def known_mounts(self, pid: int | str = "self") -> list[Mount]:
        """As :meth:`mounts`, read once for each namespace."""
        namespace = self.link(pid, "ns/mnt") or str(pid)
        if namespace not in self._mounts:
            self._mounts[namespace] = self.mounts(pid)
        return self._mounts[namespace]

    def is_on_served(self, pid: int, mount: int | str) -> bool:
        """Whether another machine or process has to answer for a file of a process.

        Args:
            mount: the id of the mount that it is on, or the device of its file system.
        """
        return any(mount in self._served_mounts(each) for each in ("self", pid))

    def _served_mounts(self, pid: int | str) -> frozenset[int | str]:
        namespace = self.link(pid, "ns/mnt") or str(pid)
        if namespace not in self._served_by:
            served = [m for m in self.known_mounts(pid) if is_served(m.kind)]
            self._served_by[namespace] = frozenset(x for m in served for x in (m.id, m.device))
        return self._served_by[namespace]

    def is_at(self, pid: int, path: str) -> bool:
        """Whether a path that the kernel prints of a process leads to the same file for us.

        So it does where it leads to the same place of the same file system.
        """
        return self.sees_our_mounts(pid) or (
            _place(path, self.known_mounts(pid)) == _place(path, self.known_mounts())
        )

    def is_local(self, path: str) -> bool:
        """Whether no other machine or process has to answer for a path of ours."""
        if self._served is None:
            self._served = served_mount_points()
        return not leads_below(path, self._served, set())

    def node(self, path: str) -> int:
        """The number of a character device; 0 if it is none, or that cannot be known.

        Args:
            path: of a link to it in a process's directory ("4711/fd/3"), which is on no file
                system that is served.
        """
        return self._nodes.node(f"{self.path}/{path}")

    def memory(self, pid: int) -> tuple[int, int] | None:
        """Its part of the memory that it shares, and what it has alone; in bytes.

        None if it cannot be read.
        """
        try:
            pss, uss = read_rollup(self.text(pid, ROLLUP))
        except KeyError:  # of a process that ends it is empty
            return None
        return pss << 10, uss << 10


def _our_namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def _place(path: str, mounts: list[Mount]) -> tuple[str, str] | None:
    """The file system that a path leads to, and the path there; None if nothing is mounted."""
    best: Mount | None = None
    for mount in mounts:
        point = mount.point.rstrip("/")
        covers = path == point or path.startswith(f"{point}/")
        if covers and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    if best is None:
        return None
    return best.device, best.root.rstrip("/") + path.removeprefix(best.point.rstrip("/"))
