"""What a containerd and its containers leave on the machine, seen and removed from outside.

containerd's own lists say what containerd believes. This module reads what is there: processes
in /proc, mounts in mountinfo, directories of cgroups, sockets, fifos, the low-level runtime's
state. Tests compare two readings to find what was left; a private containerd removes by them
what it made.

Rules
- What belongs to a containerd is told by its marks: its directory, which nobody else uses, and
  its namespace, a name that nobody else uses. No guess is made by program name: other
  containerds may run on the machine.
- What the CRI made is in a namespace that others have too, and belongs by its ids, which are
  random and are not given twice.
- A process belongs if its arguments, environment, working directory or cgroup carry a mark, or
  if its parent belongs. containerd itself does not belong.
- A dead child belongs to the parent that has to reap it. What init has not reaped yet is init's.

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

from integration.containers.procfs import Procfs, Status
from shim import syscalls

# Where shims of containerd 1.6 and later listen, whatever containerd's own state directory is.
SOCKETS: Final = "/run/containerd/s"
# Where the runc family keeps its state unless told otherwise, one directory for a namespace.
RUNTIME_STATE: Final = "/run/containerd/runc"

# Where the CRI has its containers.
_PODS: Final = "k8s.io"
_CRI: Final = "io.containerd.grpc.v1.cri"
# Where CNI remembers how it made the network of a pod.
_CNI_RESULTS: Final = "/var/lib/cni/results"

_FORK_SERVER: Final = "fork-server"
_TASKS: Final = "io.containerd.runtime.v2.task"


class _Trusting(Procfs):
    """Reads command lines and environments itself, and not in a child.

    They are of a containerd of our own, or, for a wary one, of processes of our user and mounts.
    """

    def is_own(self, pid: int) -> bool:
        del pid
        return True


_PROCFS: Final = _Trusting()
_POLL: Final = 0.01


@dataclass(frozen=True, slots=True)
class Marks:
    """By what the traces of one containerd are told from those of others."""

    directory: str  # all its files are below it; absolute, no link in it
    address: str  # its socket, as its shims are told
    namespace: str  # the one namespace that is used in it; unique on this machine
    # ids of containers and groups it may have seen. Too many do no harm.
    names: frozenset[str] = field(default=frozenset())
    pid: int = 0  # containerd's process; 0 if it does not run
    # ids of pods and their containers that the CRI has given. Too many do no harm.
    pods: frozenset[str] = field(default=frozenset())
    # whether there are containers of strangers, who can have whoever reads their words wait: then
    # words are read of the caller's own processes in the caller's mount namespace alone
    wary: bool = False


@dataclass(frozen=True, slots=True, order=True)
class Trace:
    """One thing that is there."""

    # "process", "mount", "cgroup", "socket", "fifo", "bundle", "runtime state", "pod", "file"
    kind: str
    name: str  # the pid or the path
    detail: str = ""  # what helps a reader to recognise it

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" + (f" ({self.detail})" if self.detail else "")


def find(marks: Marks) -> set[Trace]:
    """Everything of a containerd that is there now, besides containerd and its own files."""
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
    """Remove all that :func:`find` finds; once, since some of it takes a moment to go.

    Returns:
        What is still there.
    """
    for trace in sorted(find(marks), key=_removal_order):
        with contextlib.suppress(OSError):
            _REMOVALS[trace.kind](trace.name)
    return find(marks)


def clean(marks: Marks, seconds: float) -> set[Trace]:
    """Remove all that is found, again and again until it is gone.

    Args:
        marks: of the containerd.
        seconds: that it may take.

    Returns:
        What is still there.
    """
    deadline = time.monotonic() + seconds
    while (left := remove(marks)) and time.monotonic() < deadline:
        time.sleep(_POLL)
    return left


def forget(namespace: str) -> None:
    """Remove what a namespace has of its own, once nothing is left of its containers."""
    for hierarchy in cgroup_hierarchies():
        with contextlib.suppress(OSError):
            os.rmdir(os.path.join(hierarchy, namespace))
    shutil.rmtree(os.path.join(RUNTIME_STATE, namespace), ignore_errors=True)


def socket_path(marks: Marks, group: str, *, namespace: str | None = None) -> str:
    """The socket of the shim that serves ``group`` (a container's id, or its pod's)."""
    return _socket_path(marks.address, namespace or marks.namespace, group)


@functools.lru_cache(maxsize=1 << 14)  # who compares two readings asks for the same ones again
def _socket_path(address: str, namespace: str, group: str) -> str:
    key = posixpath.join(address, namespace, group)
    return os.path.join(SOCKETS, hashlib.sha256(key.encode()).hexdigest())


def processes(marks: Marks) -> set[Trace]:
    """The processes that belong: shims, runtimes, containers, clients, and their children."""
    table = _process_table()
    ourselves = _ancestors(os.getpid(), table)
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
    """The processes that fork this containerd's shims.

    They are no trace of a container: one stays for the next, until nobody has asked for long.
    """
    table = ((pid, _words(pid, marks)) for pid in _PROCFS.pids())
    return {pid for pid, words in table if words[-1:] == [_FORK_SERVER] and marks.address in words}


def mounts(marks: Marks) -> set[Trace]:
    """Mounts of this mount namespace at, or of something below, the directory."""
    table = _PROCFS.mounts()
    # What a bind mount shows is named by its path in the file system it is of, and that file
    # system may itself be mounted from the middle (a subvolume, a root that was bound).
    home = max(
        (m for m in table if m.point == "/" or _is_below(marks.directory, m.point)),
        key=lambda m: len(m.point),
    )
    inside = posixpath.join(home.root, posixpath.relpath(marks.directory, home.point))
    return {
        Trace("mount", mount.point, f"{mount.kind} from {mount.source}")
        for mount in table
        if _is_below(mount.point, marks.directory)
        or (mount.device == home.device and _is_below(mount.root, inside))
    }


def cgroups(marks: Marks) -> set[Trace]:
    """Cgroups of the namespace's containers, in every hierarchy.

    The namespace's own directory is not one: the low-level runtimes leave it behind.
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
    """The sockets of shims, of the names that were used and those that bundles name.

    Beside a socket there can be links that announce containers to its shim.
    """
    paths = {socket_path(marks, name) for name in marks.names}
    paths |= {socket_path(marks, pod, namespace=_PODS) for pod in marks.pods}
    for bundle in bundles(marks):
        with contextlib.suppress(OSError), open(os.path.join(bundle.name, "address")) as file:
            paths.add(file.read().strip().removeprefix("unix://"))
    # Of names there may be thousands, of folders one or two with few sockets in them.
    folders = {os.path.dirname(path) for path in paths}
    there = (path for folder in folders for path in _entries(folder))
    return {Trace("socket", path) for path in there if not paths.isdisjoint(_up_to_dots(path))}


def _up_to_dots(path: str) -> Iterator[str]:
    """A path, and what of it is before each dot of its name."""
    directory, name = os.path.split(path)
    parts = name.split(".")
    for count in range(len(parts)):
        yield os.path.join(directory, ".".join(parts[: count + 1]))


def fifos(marks: Marks) -> set[Trace]:
    """Fifos that a client was told to make below the directory."""
    found = set()
    for directory, _, names in os.walk(os.path.join(marks.directory, "fifo")):
        paths = (os.path.join(directory, name) for name in names)
        found |= {Trace("fifo", path) for path in paths if _is_fifo(path)}
    return found


def bundles(marks: Marks) -> set[Trace]:
    """Bundles and work directories of tasks."""
    return {
        Trace("bundle", path)
        for part in ("state", "root")
        for namespace in (marks.namespace, _PODS)
        for path in _entries(os.path.join(marks.directory, part, _TASKS, namespace))
    }


def runtime_states(marks: Marks) -> set[Trace]:
    """What runc or crun know of containers, below the usual root and one of the directory's.

    An id begins with a letter or a digit; what begins with a dot is crun's own, for all of them.
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
    """What the CRI and the network's plugins keep of pods and containers."""
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
    """What is left in the directory for temporary files that containerd's children are given."""
    return {Trace("file", path) for path in _entries(os.path.join(marks.directory, "tmp"))}


def _is_marked(pid: int, marks: Marks) -> bool:
    words = _words(pid, marks)
    if any(marks.directory in word or word == marks.namespace for word in words):
        return True
    if not marks.wary and marks.directory in _PROCFS.text(pid, "environ"):
        return True
    if _is_below(_PROCFS.link(pid, "cwd"), marks.directory):
        return True
    paths = (line.rpartition(":")[2] for line in _PROCFS.text(pid, "cgroup").splitlines())
    places = {name for path in paths for name in path.split("/")}
    return marks.namespace in places or not marks.pods.isdisjoint(places)


def _words(pid: int, marks: Marks) -> list[str]:
    """The command line of a process; none if it is not to be read."""
    if marks.wary and not (
        _PROCFS.owner(pid) == os.geteuid()
        and _PROCFS.link(pid, "ns/mnt") == _PROCFS.link(os.getpid(), "ns/mnt")
    ):
        return []
    return _PROCFS.words(pid)


def _process_table() -> dict[int, Status]:
    """All processes but the kernel's own threads."""
    found = ((pid, _PROCFS.status(pid)) for pid in _PROCFS.pids())
    return {pid: status for pid, status in found if status is not None and not status.is_kernel}


def _ancestors(pid: int, table: dict[int, Status]) -> set[int]:
    line = set()
    while pid and pid not in line:
        line.add(pid)
        pid = table[pid].parent if pid in table else 0
    return line


def _portrait(status: Status) -> str:
    if status.state == "Z":
        return f"zombie of {status.parent}"
    words = " ".join(_PROCFS.words(status.pid)).strip()
    return words[:160] or _PROCFS.text(status.pid, "comm").rstrip("\n")


def cgroup_hierarchies() -> list[str]:
    """Where each hierarchy of cgroups is mounted."""
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


# In this order: what holds other things goes first, what is held last.
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
    """By kind, and within a kind the deepest path first."""
    return _ORDER[trace.kind], -trace.name.count("/")
