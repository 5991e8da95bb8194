"""Read processes from procfs. A field of a process that has ended is empty.

Rules
- A reader never waits for a file system that another machine or process serves. It reads a link of
  a process (working directory, program, open files) and never follows it. What the link leads to is
  what the kernel prints: fdinfo, mountinfo, maps.
- For some files the kernel reads the memory of the process, and the process can make it wait. Only
  for the node's own processes (:meth:`Procfs.is_own`) are these read directly. For all others a
  child with a deadline reads them (:mod:`integration.containers.bounded_reader`). The same child
  reads the number of a device node.
- A process can have many files, mappings and sockets. Each read has a limit and happens once.
- Mounts and sockets are read once for each namespace and each :class:`Procfs`.
- Only a newline ends a line. The kernel prints other control characters of names as they are, and a
  process chooses its name and those of its files and mounts.

Other rooms use the methods that return one fact. The methods that read any file or link by its name
(``text``, ``link``, ``node``, ``descriptors``, ``open_file``, ``mappings``) are for this room only.

Source: proc(5); namespaces(7).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from itertools import islice
from typing import Final

from api.values import dataclass
from integration.containers.bounded_reader import Reader
from integration.containers.memory import ROLLUP, read_rollup
from shim.mountinfo import is_served, leads_below, served_mount_points, unescape

# Fields of /proc/PID/stat after the program's name, which may contain spaces and parentheses.
_STATE, _PARENT, _FLAGS, _THREADS, _START_TIME, _START_STACK = 0, 1, 6, 17, 19, 25
_PF_KTHREAD: Final = 0x00200000  # include/linux/sched.h
_ACCEPTS: Final = "00010000"  # SO_ACCEPTCON: a listening socket, not one of its connections
_PATH_COLUMN, _INODE_COLUMN, _FLAGS_COLUMN = 7, 6, 3
_OPEN_FILES_LIMIT: Final = re.compile(r"^Max open files +(\d+)", re.MULTILINE | re.ASCII)

DELETED: Final = " (deleted)"
"""The kernel appends it to the name of a file that was removed."""

_MOST_DESCRIPTORS: Final = 1 << 14
_MOST_BYTES: Final = 64 << 20
# To print these files, the kernel reads the memory of the process or takes one of its locks. The
# numbers are the maximum sizes to read.
_OF_MEMORY: Final = {
    "cmdline": 1 << 17, "environ": 1 << 20, "maps": _MOST_BYTES, ROLLUP: 1 << 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Status:
    """The ``stat`` of a process."""

    pid: int
    parent: int  # the pid of its parent
    state: str  # one letter
    start_time: int  # in clock ticks since boot
    # The random address at which its stack starts. A forked process has the same address as its
    # parent. 0 if the kernel hides it.
    stack: int
    threads: int = 1  # how many still run
    is_kernel: bool = False  # whether it is a kernel thread
    name: str = ""  # the program's name or one that the process chose; 15 bytes at most

    @property
    def is_zombie(self) -> bool:
        """Whether it has exited and waits to be reaped.

        A process whose first thread has exited looks the same, but still has other threads.
        """
        return self.state in {"Z", "X"} and self.threads <= 1

    @property
    def started_since_boot(self) -> float:
        """Its start in seconds since boot, a clock that cannot be set; precise to a hundredth."""
        return self.start_time / os.sysconf("SC_CLK_TCK")

    @property
    def started(self) -> float:
        """Its start in seconds since the epoch."""
        boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return boot + self.started_since_boot

    def existed_at(self, when: float, slack: float) -> bool:
        """Whether the process was started before a moment, given in seconds since boot.

        Args:
            slack: by how many seconds the clocks may differ.
        """
        return self.started_since_boot <= when + slack

    @property
    def age(self) -> float:
        """Seconds since its start."""
        return max(0.0, time.time() - self.started)


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of mountinfo."""

    device: str  # "MAJOR:MINOR" of the file system
    root: str  # the directory of the file system that is mounted
    point: str
    kind: str  # the type of the file system
    source: str  # the name that the file system gives
    options: tuple[str, ...]  # of the mount and of the file system
    id: int = 0  # unique at one time among the mounts of all namespaces


@dataclass(frozen=True, slots=True)
class OpenFile:
    """The ``fdinfo`` of a descriptor."""

    flags: int  # of open(2)
    mount: int  # the id of the mount; 0 if the kernel does not print it
    inode: int  # 0 on a kernel before 5.14

    @property
    def is_path_only(self) -> bool:
        """Whether it was opened with O_PATH: it names the file and does not hold it open."""
        return bool(self.flags & os.O_PATH)


@dataclass(frozen=True, slots=True)
class Mapping:
    """A file that is mapped into the memory of a process."""

    addresses: str  # the name of its link in ``map_files``
    device: str  # "MAJOR:MINOR" of the file system, in decimal as in mountinfo
    inode: int  # of the file
    path: str  # in the process's mount namespace; a removed file ends in " (deleted)"


class Procfs:
    """A procfs, with caches that last for one scan of the node.

    Args:
        path: the mount point.
    """

    def __init__(self, path: str = "/proc") -> None:
        self.path = path
        self._texts, self._nodes = Reader(), Reader()
        self._homes: dict[str, frozenset[str]] = {}
        self._sockets: dict[str, dict[str, str]] = {}
        self._mounts: dict[str, list[Mount]] = {}
        self._served_by: dict[str, frozenset[int | str]] = {}
        self._served: frozenset[str] | None = None

    # -- which processes there are, and whose they are --------------------------------------------

    def pids(self) -> Iterator[int]:
        """Yield the pids of all processes in order."""
        yield from sorted(int(n) for n in os.listdir(self.path) if n.isdecimal() and n.isascii())

    def pids_by_trust(self) -> list[int]:
        """Return all pids; those in containers come last.

        A container can exhaust the child that reads with a deadline, which then reads nothing more.
        """
        return sorted(self.pids(), key=self.is_contained)

    def status(self, pid: int) -> Status | None:
        """Return the ``stat`` of a process; None if the process has ended."""
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

    def ancestors(self, pid: int) -> Iterator[int]:
        """Yield a process and its ancestors, without the node's first process."""
        while pid > 1:
            yield pid
            status = self.status(pid)
            pid = 0 if status is None else status.parent

    def users(self, pid: int) -> list[int]:
        """Return the real, effective, saved and file system user; empty if it has ended."""
        for line in self.text(pid, "status").split("\n"):
            if line.startswith("Uid:"):
                return [int(word) for word in line.split()[1:]]
        return []

    def owner(self, pid: int) -> int | None:
        """Return the effective user; None if the process has ended."""
        return next(iter(self.users(pid)[1:]), None)

    def is_own(self, pid: int, *, is_roots: bool = False) -> bool:
        """Whether a process runs as root or as the caller, in the node's or our mount namespace.

        No tenant controls the memory or the files of such a process.

        Args:
            is_roots: whether it must run as root.
        """
        users = {0} if is_roots else {0, os.geteuid()}
        return self.namespace(pid, "mnt") in self._home("mnt") and (
            users.issuperset(self.users(pid) or [-1])
        )

    def is_contained(self, pid: int) -> bool:
        """Whether a process is in a container: it has its own mounts, and its own pids or users."""
        return self._is_elsewhere(pid, "mnt") and (
            self._is_elsewhere(pid, "pid") or self._is_elsewhere(pid, "user")
        )

    def namespace(self, pid: int, kind: str) -> str:
        """Return the name of a namespace of a process ("mnt:[4026531841]"); "" if unreadable."""
        return self.link(pid, f"ns/{kind}")

    def sees_our_mounts(self, pid: int) -> bool:
        """Whether a process is in our mount namespace, or its namespace cannot be read."""
        return self.namespace(pid, "mnt") in {"", _our_namespace("mnt")}

    def _is_elsewhere(self, pid: int, kind: str) -> bool:
        namespace = self.namespace(pid, kind)
        return bool(namespace) and namespace not in self._home(kind)

    def _home(self, kind: str) -> frozenset[str]:
        """Return the namespaces of the node's first process and of this one."""
        if kind not in self._homes:
            both = {self.namespace(1, kind), _our_namespace(kind)}
            self._homes[kind] = frozenset(both - {""})
        return self._homes[kind]

    # -- one fact of a process --------------------------------------------------------------------

    def name(self, pid: int) -> str:
        """Return the short name of a process, which it can choose; "" if it has ended."""
        return self.text(pid, "comm").rstrip("\n")

    def program(self, pid: int) -> str:
        """Return the path of the executable as the process sees it; "" if unreadable."""
        return self.link(pid, "exe")

    def hides_program(self, pid: int) -> bool:
        """Whether the caller lacks the permission to see which program a process executes."""
        try:
            os.readlink(f"{self.path}/{pid}/exe")
        except OSError as error:  # otherwise it has ended, or is a kernel thread
            return isinstance(error, PermissionError)
        return False

    def words(self, pid: int) -> list[str]:
        """Return the command line, without the trailing zeros of one that was overwritten."""
        line = self.text(pid, "cmdline").rstrip("\0")
        return line.split("\0") if line else []

    def variable(self, pid: int, name: str) -> str:
        """Return an environment variable that the process was started with; "" if unset."""
        found = (v for v in self.text(pid, "environ").split("\0") if v.startswith(f"{name}="))
        return next(found, "").partition("=")[2]

    def cgroup(self, pid: int) -> str:
        """Return the text of /proc/PID/cgroup (:func:`~integration.containers.cgroups`)."""
        return self.text(pid, "cgroup")

    def open_files_limit(self, pid: int) -> int | None:
        """Return the soft limit of open files; None if there is none, or it cannot be read."""
        found = _OPEN_FILES_LIMIT.search(self.text(pid, "limits"))
        return int(found[1]) if found else None

    def memory(self, pid: int) -> tuple[int, int] | None:
        """Return PSS and USS in bytes; None if they cannot be read."""
        try:
            pss, uss = read_rollup(self.text(pid, ROLLUP))
        except KeyError:  # the process is exiting
            return None
        return pss << 10, uss << 10

    # -- files and links by name: for this room only ----------------------------------------------

    def text(self, pid: int | str, name: str) -> str:
        """Return the text of a file of a process; "" if it cannot be read."""
        path = f"{self.path}/{pid}/{name}"
        most = _OF_MEMORY.get(name, _MOST_BYTES)
        if name in _OF_MEMORY and pid != "self" and not self.is_own(int(pid)):
            return os.fsdecode(self._texts.text(path, most) or b"")
        try:
            with open(path, "rb") as file:
                return os.fsdecode(file.read(most))
        except OSError:
            return ""

    def link(self, pid: int | str, name: str) -> str:
        """Return the text of a link of a process, which is not followed; "" if unreadable."""
        try:
            return os.readlink(f"{self.path}/{pid}/{name}")
        except OSError:
            return ""

    # -- its files --------------------------------------------------------------------------------

    def descriptors(self, pid: int) -> dict[str, str]:
        """Return the open files by number; with very many, those with the lowest numbers."""
        try:
            with os.scandir(f"{self.path}/{pid}/fd") as entries:
                numbers = [entry.name for entry in islice(entries, _MOST_DESCRIPTORS)]
        except OSError:
            return {}
        return {number: self.link(pid, f"fd/{number}") for number in numbers}

    def open_file(self, pid: int | str, number: str) -> OpenFile | None:
        """Return the ``fdinfo`` of a descriptor; None if it was closed."""
        lines = (line.partition(":") for line in self.text(pid, f"fdinfo/{number}").split("\n"))
        printed = {name: value.strip() for name, _, value in lines}
        try:
            flags = int(printed["flags"], 8)
            return OpenFile(flags, int(printed.get("mnt_id", 0)), int(printed.get("ino", 0)))
        except (KeyError, ValueError):
            return None

    def has_open(self, pid: int, path: str) -> bool:
        """Whether a process has a file open, under whatever directory it sees the file.

        Args:
            path: a file that only this project creates, so that its base name identifies it.
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
            # A kernel that prints no inode leaves only the path.
            and (file.inode == inode if file.inode else link == real)
        }
        if not alike or ours is None:
            return False
        mounts = {m.id: m.device for each in ("self", pid) for m in self.mounts(each)}
        device = mounts.get(ours.mount)
        # A mount in neither namespace may have belonged to a previous agent.
        return any(mounts.get(mount, device) == device for mount in alike)

    def node(self, path: str) -> int:
        """Return the number of a character device; 0 for other files, or if unknown.

        Args:
            path: a link in a process's directory ("4711/fd/3") that does not lead to a file system
                which another machine or process serves.
        """
        return self._nodes.node(f"{self.path}/{path}")

    def mappings(self, pid: int) -> list[Mapping]:
        """Return the parts of its memory that are mapped from files."""
        found = []
        for line in self.text(pid, "maps").split("\n"):
            # address permissions offset device inode path
            words = line.split(maxsplit=5)
            if len(words) == 6 and words[4] != "0":  # noqa: PLR2004 - as listed above
                major, _, minor = words[3].partition(":")
                device = f"{int(major, 16)}:{int(minor, 16)}"
                # ``map_files`` prints addresses without leading zeros.
                first, _, last = words[0].partition("-")
                addresses = f"{first.lstrip('0') or '0'}-{last.lstrip('0')}"
                found.append(Mapping(addresses, device, int(words[4]), words[5]))
        return found

    def mapped(self, pid: int) -> list[str]:
        """Return the paths of the mapped files; a removed file ends in " (deleted)"."""
        paths = (each.path for each in self.mappings(pid))
        return list(dict.fromkeys(path for path in paths if path.startswith("/")))

    # -- its sockets ------------------------------------------------------------------------------

    def listening(self, pid: int) -> set[str]:
        """Return the paths of the unix sockets that it listens on, as it named them."""
        own = [link for link in self.descriptors(pid).values() if link.startswith("socket:[")]
        if not own:
            return set()
        sockets = self._listeners(pid)
        return {sockets[link] for link in own if link in sockets}

    def _listeners(self, pid: int) -> dict[str, str]:
        """Return the paths of all listening sockets in a process's network namespace."""
        namespace = self.namespace(pid, "net") or str(pid)
        if namespace not in self._sockets:
            found = self._sockets[namespace] = {}
            for line in self.text(pid, "net/unix").split("\n"):
                columns = line.split(None, _PATH_COLUMN)
                # A socket without a path has one column less.
                if len(columns) > _PATH_COLUMN and columns[_FLAGS_COLUMN] == _ACCEPTS:
                    found[f"socket:[{columns[_INODE_COLUMN]}]"] = columns[_PATH_COLUMN]
        return self._sockets[namespace]

    # -- its mounts -------------------------------------------------------------------------------

    def mounts(self, pid: int | str = "self") -> list[Mount]:
        """Return the mounts of its mount namespace in the kernel's order; empty if it has ended."""
        found = []
        for line in os.fsencode(self.text(pid, "mountinfo")).split(b"\n"):
            # Other white space is part of a name, and a source may be empty.
            words = [os.fsdecode(unescape(word)) for word in line.split(b" ")]
            if "-" in words:
                end = words.index("-")
                options = {*words[5].split(","), *words[end + 3].split(",")}
                device, root, point, kind, source = *words[2:5], *words[end + 1 : end + 3]
                found.append(
                    Mount(device, root, point, kind, source, tuple(sorted(options)), int(words[0]))
                )
        return found

    def known_mounts(self, pid: int | str = "self") -> list[Mount]:
        """Return :meth:`mounts`, read once for each namespace."""
        namespace = self.link(pid, "ns/mnt") or str(pid)
        if namespace not in self._mounts:
            self._mounts[namespace] = self.mounts(pid)
        return self._mounts[namespace]

    def is_on_served(self, pid: int, mount: int | str) -> bool:
        """Whether a file of a process is on a file system that another machine or process serves.

        Args:
            mount: the id of the file's mount, or the device of its file system.
        """
        return any(mount in self._served_mounts(each) for each in ("self", pid))

    def _served_mounts(self, pid: int | str) -> frozenset[int | str]:
        namespace = self.link(pid, "ns/mnt") or str(pid)
        if namespace not in self._served_by:
            served = [m for m in self.known_mounts(pid) if is_served(m.kind)]
            self._served_by[namespace] = frozenset(x for m in served for x in (m.id, m.device))
        return self._served_by[namespace]

    def is_at(self, pid: int, path: str) -> bool:
        """Whether a path that the kernel prints for a process names the same file for us.

        It does if it leads to the same place in the same file system.
        """
        if self.sees_our_mounts(pid):
            return True
        here, there = self.known_mounts(), self.known_mounts(pid)
        return places_of(path, here)[:1] == places_of(path, there)[:1]

    def is_local(self, path: str) -> bool:
        """Whether a path of ours leads to no file system that another machine or process serves."""
        if self._served is None:
            self._served = served_mount_points()
        return not leads_below(path, self._served, set())


def _our_namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def mounts_above(path: str, mounts: list[Mount]) -> list[Mount]:
    """Return the mounts at or above a path.

    The first is the mount where the path leads now. It covers the others.
    """
    above = [m for m in mounts if f"{path}/".startswith(f"{m.point.rstrip('/')}/")]
    above.reverse()  # of mounts at one point, the last is on top
    return sorted(above, key=lambda mount: len(mount.point), reverse=True)


def places_of(path: str, mounts: list[Mount]) -> list[tuple[str, str]]:
    """Return the device of each file system mounted above a path, with the path in it."""
    return [
        (m.device, m.root.rstrip("/") + path.removeprefix(m.point.rstrip("/")))
        for m in mounts_above(path, mounts)
    ]
