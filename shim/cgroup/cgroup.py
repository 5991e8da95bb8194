"""Find a container's cgroup, and the processes in it.

Rules
- A host has cgroups of version 1 (a hierarchy for each controller), of version 2 (one for all
  controllers), or is a hybrid: version 1 has the controllers, and version 2 is mounted next to it.
  As in runc and containerd, version 2 has the controllers if it is mounted at /sys/fs/cgroup.
- A container has one path per hierarchy, listed in its init's /proc/PID/cgroup. A mount may show
  only a part of a hierarchy (in a container that runs containers); the root of that part is then
  removed from the path.
- A cgroup shared with the shim or the whole machine is not the container's own: a runtime may not
  have created one, and it does not join unknown hierarchies.

Source: cgroups(7); proc(5), /proc/PID/mountinfo; kernel Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterable, Mapping
from typing import Final

from api.values import dataclass
from shim.files import at_and_below
from shim.mountinfo import unescape

_ROOT: Final = "/sys/fs/cgroup"

# The name of version 2's hierarchy in /proc/PID/cgroup, which has no list of controllers.
UNIFIED: Final = ""

_POINT_FIELD: Final = 4  # of mountinfo

# How often to look for processes that started while others were signalled.
_ROUNDS: Final = 16

# The first hierarchies to search for processes and threads, which every kernel with containers has.
_COMMON: Final = ("pids", "devices", "memory", "freezer")


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Where the kernel's hierarchies are mounted."""

    # by controller (or ``name=systemd``, or UNIFIED), the mounted part of the hierarchy, and where
    mounts: Mapping[str, tuple[str, str]]
    is_v2: bool  # whether version 2 has the controllers

    def directory(self, controller: str, path: str) -> str | None:
        """Return the directory of a cgroup.

        Args:
            controller: the controller of the hierarchy.
            path: the cgroup's path in the hierarchy, as in /proc/PID/cgroup.

        Returns:
            The directory, which need not exist; None if no mount shows that path.
        """
        if controller not in self.mounts or ".." in path.split("/"):
            return None
        root, point = self.mounts[controller]
        root = root.rstrip("/")
        if path != root and not path.startswith(f"{root}/"):
            return None
        return point + path[len(root) :].rstrip("/")


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The cgroup of one container."""

    # its directory by controller, UNIFIED for version 2; without the hierarchies in which it has no
    # cgroup of its own
    directories: Mapping[str, str]
    is_v2: bool  # whether version 2 has the controllers

    def directory(self, controller: str) -> str | None:
        """Return the directory with a controller's files; None if it has none of its own."""
        return self.directories.get(UNIFIED if self.is_v2 else controller)

    def pids(self) -> list[int]:
        """Return the processes in it and in the cgroups below it, in ascending order.

        Returns:
            Their pids; empty if the cgroup is gone.
        """
        names = [name for name in _COMMON if name in self.directories] or [*self.directories]
        return pids_in(self.directories[names[0]])

    def signal(self, number: int) -> None:
        """Signal each process in it and below it, and those that start meanwhile.

        Args:
            number: the signal.

        Raises:
            OSError: no descriptor is free.
        """
        told: set[int] = set()
        for _ in range(_ROUNDS):
            new = [pid for pid in self.pids() if pid not in told]
            if not new:
                return
            for pid in new:
                self._signal_one(pid, number)
            told.update(new)

    def _signal_one(self, pid: int, number: int) -> None:
        """Signal a process if it is still in the cgroup, since its pid may have been reused."""
        try:
            held = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            if self._has(pid):
                signal.pidfd_send_signal(held, number)
        except ProcessLookupError:
            pass
        finally:
            os.close(held)

    def _has(self, pid: int) -> bool:
        hierarchies = _mounted()
        for controller, path in _paths_of(pid).items():
            own, directory = (
                self.directories.get(controller),
                hierarchies.directory(controller, path),
            )
            if own and directory and (directory == own or directory.startswith(f"{own}/")):
                return True
        return False


def of(pid: int) -> Cgroup | None:
    """Return the cgroup of a container.

    Args:
        pid: a live process of the container.

    Returns:
        Its cgroup; None if the process is gone, or no cgroup of its own is visible here.
    """
    hierarchies = _mounted()
    shared = _paths_of("self")
    directories = {}
    for controller, path in _paths_of(pid).items():
        if path in ("/", shared.get(controller)):
            continue
        directory = hierarchies.directory(controller, path)
        if directory is not None and os.path.exists(os.path.join(directory, "cgroup.procs")):
            directories[controller] = directory
    if not directories or (hierarchies.is_v2 and UNIFIED not in directories):
        return None
    return Cgroup(directories, hierarchies.is_v2)


def at(path: str) -> Cgroup | None:
    """Return the cgroup at a path.

    Args:
        path: the same path in every hierarchy, from the root.

    Returns:
        The cgroup; None if no hierarchy has it.
    """
    hierarchies = _mounted()
    found = {name: hierarchies.directory(name, path) for name in hierarchies.mounts}
    directories = {
        name: directory
        for name, directory in found.items()
        if directory is not None and os.path.exists(os.path.join(directory, "cgroup.procs"))
    }
    return Cgroup(directories, hierarchies.is_v2) if directories else None


def threads_file() -> str | None:
    """Return the path of the file with the threads of this thread's cgroup, in one hierarchy.

    Returns:
        The path; None if no mount shows a cgroup of this thread.
    """
    hierarchies, paths = _mounted(), _paths_of("thread-self")
    for name, file in ((UNIFIED, "cgroup.threads"), *((name, "tasks") for name in _COMMON)):
        directory = hierarchies.directory(name, paths[name]) if name in paths else None
        if directory is not None:
            return os.path.join(directory, file)
    return None


def named(path: str) -> list[str]:
    """Return the directories of the cgroup that an OCI spec names.

    Args:
        path: the path relative to the hierarchies' mount points.

    Returns:
        The existing ones, one for each hierarchy, without cgroups with that path inside another
        cgroup.
    """
    below = os.path.normpath(f"/{path}").strip("/")
    points = dict.fromkeys(point for _, point in _mounted().mounts.values())
    directories = [os.path.join(point, below) for point in points] if below else []
    return [d for d in directories if os.path.exists(os.path.join(d, "cgroup.procs"))]


def pids_in(directory: str) -> list[int]:
    """Return the processes in a cgroup and in those below it, in ascending order.

    Args:
        directory: the directory of the cgroup, in any hierarchy.

    Returns:
        Their pids; empty if the cgroup is gone.
    """
    pids: set[int] = set()
    for folder in at_and_below(directory):
        try:
            with open(os.path.join(folder, "cgroup.procs"), encoding="ascii") as file:
                pids.update(int(line) for line in file)
        except OSError:
            continue  # removed meanwhile
    pids.discard(0)  # a process outside our pid namespace; for kill(2), 0 means ourselves
    return sorted(pids)


def join_those_of(pid: int) -> None:
    """Move this process into another one's cgroups, in each mounted hierarchy.

    Args:
        pid: the other process.

    Raises:
        OSError: one of the cgroups accepts no process.
    """
    ours, hierarchies = _paths_of("self"), _mounted()
    for controller, path in _paths_of(pid).items():
        directory = hierarchies.directory(controller, path)
        if directory is not None and ours.get(controller) != path:
            with open(os.path.join(directory, "cgroup.procs"), "wb", buffering=0) as file:
                file.write(b"0")


def parse_mounts(mountinfo: Iterable[bytes]) -> Hierarchies:
    """Return the hierarchies in a mountinfo file.

    Args:
        mountinfo: the lines of the file. Mounts of other file systems are skipped.

    Returns:
        The hierarchies. Of several mounts, the first that shows the whole hierarchy counts.
    """
    mounts: dict[str, tuple[str, str]] = {}
    is_v2 = False
    for line in mountinfo:
        before, _, after = line.partition(b" - ")
        kind, _, rest = after.partition(b" ")
        fields = before.split(b" ")  # other white space may be part of a name
        if kind not in (b"cgroup", b"cgroup2") or len(fields) <= _POINT_FIELD:
            continue
        root, point = (
            os.fsdecode(unescape(f)) for f in fields[_POINT_FIELD - 1 : _POINT_FIELD + 1]
        )
        # The options include "rw", "xattr" and the like, which are not controllers.
        options = os.fsdecode(rest).split()[-1:]
        names = [UNIFIED] if kind == b"cgroup2" else ",".join(options).split(",")
        for name in names:
            if name not in mounts or (root == "/" and mounts[name][0] != "/"):
                mounts[name] = root, point
        if point == _ROOT:
            is_v2 = kind == b"cgroup2"
    return Hierarchies(mounts, is_v2)


@functools.cache  # a host does not change its cgroup version at run time
def _mounted() -> Hierarchies:
    with open("/proc/thread-self/mountinfo", "rb") as file:
        return parse_mounts(file)


def _paths_of(pid: int | str) -> dict[str, str]:
    """Return the path of a process's cgroup by controller."""
    path = f"/proc/{pid}/cgroup"
    try:
        # A container can name its cgroups with a carriage return, or not in UTF-8.
        with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            return parse_paths(file)
    except OSError:
        return {}


def parse_paths(lines: Iterable[str]) -> dict[str, str]:
    """Return the paths in a /proc/PID/cgroup file, by controller.

    Args:
        lines: the lines of the file; malformed ones are skipped.
    """
    fields = [line.rstrip("\n").split(":", 2) for line in lines]
    return {name: f[2] for f in fields if len(f) == 3 for name in f[1].split(",")}  # noqa: PLR2004
