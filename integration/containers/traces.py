"""Find and remove what a containerd and its containers leave behind on the machine.

containerd's own lists show what containerd believes. This module reads what actually exists:
processes in /proc, mounts in mountinfo, cgroups, sockets, fifos, the state of the low-level
runtime. Tests compare two readings to find leftovers. A private containerd removes its own traces.

Rules
- Traces belong to a containerd by its marks: a directory and a namespace that only it uses. The
  name of a program proves nothing, because other containerds may run on the machine.
- All clients of the CRI share one namespace. Their traces are distinguished by their ids, which are
  random and never reused.
- A process belongs if its arguments, environment, working directory or cgroup contain a mark, or
  if its parent belongs. containerd itself does not belong.
- A dead child belongs to the parent that must reap it. A dead child of init belongs to none.

Source: proc(5), cgroups(7), containerd runtime/v2/shim (SocketAddress), go-runc.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import posixpath
import shutil
import signal
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from integration.containers.bundles import TASKS
from integration.containers.cgroups import cgroups_in
from integration.containers.procfs import Procfs, Status, places_of
from integration.containers.shims import FORK_SERVER
from shim import syscalls

# Where shims of containerd 1.6 and later listen, with any state directory.
SOCKETS: Final = "/run/containerd/s"
# Where the runc family keeps its state by default, one directory for each namespace.
RUNTIME_STATE: Final = "/run/containerd/runc"

# The namespace of the CRI's containers.
_PODS: Final = "k8s.io"
_CRI: Final = "io.containerd.grpc.v1.cri"
# Where CNI stores how it set up the network of a pod.
_CNI_RESULTS: Final = "/var/lib/cni/results"


class _Trusting(Procfs):
    """A procfs that reads command lines and environments itself, not in a child.

    Its processes belong to a private containerd, or to our user and mount namespace.
    """

    def is_own(self, pid: int, *, is_roots: bool = False) -> bool:
        del pid, is_roots
        return True


_PROCFS: Final = _Trusting()
_POLL: Final = 0.01


@dataclass(frozen=True, slots=True)
class Marks:
    """What distinguishes the traces of one containerd from those of others."""

    directory: str  # all its files are below it; absolute, without links
    address: str  # its socket, as in the command lines of its shims
    namespace: str  # the only namespace that is used; unique on this machine
    # ids of containers and groups that it may have served; more are harmless
    names: frozenset[str] = field(default=frozenset())
    pid: int = 0  # containerd's process; 0 if it does not run
    # ids of pods and their containers from the CRI; more are harmless
    pods: frozenset[str] = field(default=frozenset())
    # Whether containers of other tenants run, which could block a reader of their command lines.
    # Then only the caller's own processes in the caller's mount namespace are read.
    wary: bool = False


@dataclass(frozen=True, slots=True, order=True)
class Trace:
    """One leftover."""

    # "process", "mount", "cgroup", "socket", "fifo", "bundle", "runtime state", "pod", "file"
    kind: str
    name: str  # the pid or the path
    detail: str = ""  # helps a reader to recognise it

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" + (f" ({self.detail})" if self.detail else "")


def find(marks: Marks) -> set[Trace]:
    """Return all traces of a containerd, without containerd itself and its own files."""
    return {
        *processes(marks),
        *mounts(marks),
        *cgroups(marks),
        *sockets(marks),
        *fifos(marks),
        *bundles(marks),
        *runtime_states(marks),
        *pods(marks),
        *temporary_files(marks),
    }


def remove(marks: Marks) -> set[Trace]:
    """Remove once everything that :func:`find` finds; some traces take a moment to disappear.

    Returns:
        The remaining traces.
    """
    for trace in sorted(find(marks), key=_removal_order):
        with contextlib.suppress(OSError):
            _REMOVALS[trace.kind](trace.name)
    return find(marks)


def clean(marks: Marks, seconds: float) -> set[Trace]:
    """Remove traces repeatedly until none is left.

    Args:
        marks: the marks of the containerd.
        seconds: the time limit.

    Returns:
        The remaining traces.
    """
    deadline = time.monotonic() + seconds
    while (left := remove(marks)) and time.monotonic() < deadline:
        time.sleep(_POLL)
    return left


def forget(namespace: str) -> None:
    """Remove the directories of a namespace whose containers were all removed."""
    for hierarchy in cgroup_hierarchies():
        with contextlib.suppress(OSError):
            os.rmdir(os.path.join(hierarchy, namespace))
    shutil.rmtree(os.path.join(RUNTIME_STATE, namespace), ignore_errors=True)


def socket_path(marks: Marks, group: str, *, namespace: str | None = None) -> str:
    """Return the socket of the shim that serves ``group`` (the id of a container or its pod)."""
    return _socket_path(marks.address, namespace or marks.namespace, group)


@functools.lru_cache(maxsize=1 << 14)  # two readings need the same ones
def _socket_path(address: str, namespace: str, group: str) -> str:
    key = posixpath.join(address, namespace, group)
    return os.path.join(SOCKETS, hashlib.sha256(os.fsencode(key)).hexdigest())


def processes(marks: Marks) -> set[Trace]:
    """Return the shims, runtimes, containers and clients that belong, with their children."""
    table = _process_table()
    ourselves = {1, *_PROCFS.ancestors(os.getpid())}
    others = table.keys() - ourselves - fork_servers(marks)
    family = {pid for pid in others if _is_marked(pid, marks)} | ({marks.pid} - {0})
    while True:
        grown = family | {pid for pid, status in table.items() if status.parent in family}
        if grown == family:
            break
        family = grown
    return {
        Trace("process", str(pid), _portrait(table[pid]))
        for pid in family - ourselves - {marks.pid}
        if pid in table and not (table[pid].state == "Z" and table[pid].parent == 1)
    }


def fork_servers(marks: Marks) -> set[int]:
    """Return the processes that fork this containerd's shims.

    They are not traces of a container: a fork server exits on its own after a long idle time.
    """
    table = ((pid, _words(pid, marks)) for pid in _PROCFS.pids())
    return {pid for pid, words in table if words[-1:] == [FORK_SERVER] and marks.address in words}


def mounts(marks: Marks) -> set[Trace]:
    """Return the mounts at or below the directory, and those of files below it elsewhere."""
    table = _PROCFS.mounts()
    # mountinfo gives the source of a bind mount as a path within its file system. The mount of that
    # file system may itself start below its root (a subvolume, or another bind mount).
    device, inside = places_of(marks.directory, table)[0]
    return {
        Trace("mount", mount.point, f"{mount.kind} from {mount.source}")
        for mount in table
        if _is_below(mount.point, marks.directory)
        or (mount.device == device and _is_below(mount.root, inside))
    }


def cgroups(marks: Marks) -> set[Trace]:
    """Return the cgroups of the namespace's containers in every hierarchy.

    The namespace's own directory does not count: the low-level runtimes leave it behind.
    """
    found = set()
    for hierarchy in cgroup_hierarchies():
        top = os.path.join(hierarchy, marks.namespace)
        for directory, below, _ in os.walk(top):
            found |= {Trace("cgroup", os.path.join(directory, name)) for name in below}
        for pod in _entries(os.path.join(hierarchy, _PODS)):
            if os.path.basename(pod) in marks.pods:
                found |= {Trace("cgroup", directory) for directory, _, _ in os.walk(pod)}
    return found


def sockets(marks: Marks) -> set[Trace]:
    """Return the sockets of shims, both for the known names and from the bundles.

    Next to a socket there can be links that announce containers to its shim.
    """
    paths = {socket_path(marks, name) for name in marks.names}
    paths |= {socket_path(marks, pod, namespace=_PODS) for pod in marks.pods}
    for bundle in bundles(marks):
        with contextlib.suppress(OSError), open(os.path.join(bundle.name, "address")) as file:
            paths.add(file.read().strip().removeprefix("unix://"))
    # There may be thousands of names, but only one or two folders with few sockets.
    folders = {os.path.dirname(path) for path in paths}
    there = (path for folder in folders for path in _entries(folder))
    return {Trace("socket", path) for path in there if not paths.isdisjoint(_up_to_dots(path))}


def _up_to_dots(path: str) -> Iterator[str]:
    """Yield the prefixes of a path that end before a dot of its name, and the path."""
    directory, name = os.path.split(path)
    parts = name.split(".")
    for count in range(len(parts)):
        yield os.path.join(directory, ".".join(parts[: count + 1]))


def fifos(marks: Marks) -> set[Trace]:
    """Return the fifos of clients below the directory."""
    found = set()
    for directory, _, names in os.walk(os.path.join(marks.directory, "fifo")):
        paths = (os.path.join(directory, name) for name in names)
        found |= {Trace("fifo", path) for path in paths if _is_fifo(path)}
    return found


def bundles(marks: Marks) -> set[Trace]:
    """Return the bundles and work directories of tasks."""
    return {
        Trace("bundle", path)
        for part in ("state", "root")
        for namespace in (marks.namespace, _PODS)
        for path in _entries(os.path.join(marks.directory, part, TASKS, namespace))
    }


def runtime_states(marks: Marks) -> set[Trace]:
    """Return the state of runc or crun, below the default root and below the directory.

    An id starts with a letter or a digit. crun's own files, for all containers, start with a dot.
    """
    return {
        Trace("runtime state", path)
        for root in (RUNTIME_STATE, os.path.join(marks.directory, "runc"))
        for namespace in (marks.namespace, _PODS)
        for path in _entries(os.path.join(root, namespace))
        if not os.path.basename(path).startswith(".")
        if namespace == marks.namespace or os.path.basename(path) in marks.pods
    }


def pods(marks: Marks) -> set[Trace]:
    """Return the files of the CRI and of network plugins for pods and containers."""
    own = [
        path
        for part in ("state", "root")
        for kind in ("sandboxes", "containers", "netns")
        for path in _entries(os.path.join(marks.directory, part, _CRI, kind))
    ]
    for network in _entries(os.path.join(marks.directory, "cni", "addresses")):
        own += [path for path in _entries(network) if os.path.basename(path)[:1].isdigit()]
    # NETWORK-ID-INTERFACE
    results = [
        path
        for path in _entries(_CNI_RESULTS)
        if not marks.pods.isdisjoint(os.path.basename(path).split("-"))
    ]
    return {Trace("pod", path) for path in (*own, *results)}


def temporary_files(marks: Marks) -> set[Trace]:
    """Return the temporary files of containerd's children."""
    return {Trace("file", path) for path in _entries(os.path.join(marks.directory, "tmp"))}


def _is_marked(pid: int, marks: Marks) -> bool:
    words = _words(pid, marks)
    if any(marks.directory in word or word == marks.namespace for word in words):
        return True
    if not marks.wary and marks.directory in _PROCFS.text(pid, "environ"):
        return True
    if _is_below(_PROCFS.link(pid, "cwd"), marks.directory):
        return True
    paths = (path for _, path in cgroups_in(_PROCFS.cgroup(pid)))
    places = {name for path in paths for name in path.split("/")}
    return marks.namespace in places or not marks.pods.isdisjoint(places)


def _words(pid: int, marks: Marks) -> list[str]:
    """Return the command line of a process; empty if it may not be read."""
    if marks.wary and not (
        _PROCFS.owner(pid) == os.geteuid()
        and _PROCFS.namespace(pid, "mnt") == _PROCFS.namespace(os.getpid(), "mnt")
    ):
        return []
    return _PROCFS.words(pid)


def _process_table() -> dict[int, Status]:
    """Return all processes without kernel threads."""
    found = ((pid, _PROCFS.status(pid)) for pid in _PROCFS.pids())
    return {pid: status for pid, status in found if status is not None and not status.is_kernel}


def _portrait(status: Status) -> str:
    if status.state == "Z":
        return f"zombie of {status.parent}"
    words = " ".join(_PROCFS.words(status.pid)).strip()
    return words[:160] or _PROCFS.name(status.pid)


def cgroup_hierarchies() -> list[str]:
    """Return the mount point of each hierarchy of cgroups."""
    return [mount.point for mount in _PROCFS.mounts() if mount.kind in {"cgroup", "cgroup2"}]


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory + "/")


def _is_fifo(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.lstat(path).st_mode)
    except OSError:
        return False


def _entries(directory: str) -> list[str]:
    try:
        return [os.path.join(directory, name) for name in os.listdir(directory)]
    except OSError:
        return []


# --- Removing them -----------------------------------------------------------------------


def _kill(pid: str) -> None:
    os.kill(int(pid), signal.SIGKILL)


def _unmount(path: str) -> None:
    syscalls.umount(path, syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)


def _remove_tree(path: str) -> None:
    shutil.rmtree(path)


def _remove_any(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


# In this order: holders first, what they hold last.
_REMOVALS: Final = {
    "process": _kill,
    "mount": _unmount,
    "cgroup": os.rmdir,
    "runtime state": _remove_tree,
    "socket": os.unlink,
    "fifo": os.unlink,
    "bundle": _remove_any,
    "pod": _remove_any,
    "file": _remove_any,
}
_ORDER: Final = {kind: position for position, kind in enumerate(_REMOVALS)}


def _removal_order(trace: Trace) -> tuple[int, int]:
    """Sort by kind, and within a kind the deepest path first."""
    return _ORDER[trace.kind], -trace.name.count("/")
