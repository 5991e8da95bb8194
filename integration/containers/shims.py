"""The shims of this node, and the processes that fork them.

Any process can call itself ``containerd-shim-nvidia-v1``, also inside a container, and choose its
command line and the addresses of its sockets. So a name only makes a process a candidate. It is
accepted only with a property that no other process can have:

============  ================================================================================
shim          its working directory is a bundle that only its user can write to (compared by its
              place in the file system, which the kernel prints), and it listens at the bundle's
              ``address``. A shim whose bundle was removed runs as root or the caller, in our
              namespaces, with our code mapped. Only a shim in the node's own pid and user
              namespaces shows where containers are
fork server   it holds the lock next to its listening socket open (compared by place and inode), in
              a directory of sockets that only its user can write to
spare         it has the user, program and namespaces (mount, user, pid) of a fork server and was
              forked from it: its stack starts at the same address, which is random in others
============  ================================================================================

Processes of other users and in containers (:meth:`~integration.containers.procfs.Procfs.
is_contained`) are skipped first: they serve nothing on this node, and could make a read take as
long as they like.

The version of a process is that of the tree whose files it has mapped, removed or not. A shim was
started warm if a fork server forked it; that is unknown once the fork server has exited.

Source: proc(5); :mod:`shim.verbs.handover` and :mod:`shim.forkserver` for the command lines.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from api.values import dataclass, field, replace
from integration.containers.bundles import (
    KNOWN_STATES,
    TASKS,
    Container,
    find_containers,
    read_container,
    state_directories,
)
from integration.containers.procfs import DELETED, Procfs, Status
from integration.containers.trees import Tree, tree_of
from shim import PROGRAM

SHIM: Final = "shim"
FORK_SERVER: Final = "fork-server"
SPARE: Final = "spare"
SPARE_FLAG: Final = "-spare"
"""In the command line of a spare, which otherwise looks like that of a fork server."""

# The kernel's name of a shim, of its interpreter, or of the interpreter's loader.
_NAMES: Final = (PROGRAM[:15], "python", "ld-")
_ANY_SHIM: Final = "containerd-shim"  # of any runtime
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_NAMESPACES: Final = ("mnt", "user", "pid")
_TO_ANSWER: Final = 1.0


@dataclass(frozen=True, slots=True)
class ShimProcess:
    """A shim, a fork server or a spare."""

    pid: int
    kind: str  # SHIM, FORK_SERVER or SPARE
    uid: int  # root or the caller
    address: str  # containerd's address, from its command line
    namespace: str = ""  # containerd's; only of a shim
    group: str = ""  # the id that it was started for: of a pod's sandbox, or a container
    socket: str = ""  # where it listens; "" for a spare
    bundle: str = ""  # its working directory; "" unless it is a shim whose bundle exists
    age: float = field(default=0.0, compare=False)  # seconds since its start
    # PSS and USS in bytes; None if unknown
    memory: tuple[int, int] | None = field(default=None, compare=False)
    tree: Tree | None = None  # the tree that it was started from; None if unknown
    warm: bool | None = None  # whether a fork server forked it; None if unknown
    is_abroad: bool = False  # whether it has another pid or user namespace than the node

    def of(self, containers: Iterable[Container]) -> list[Container]:
        """Return those containers that a shim serves."""
        if not self.bundle:
            return []
        return [c for c in containers if c.namespace == self.namespace and self._serves(c)]

    def _serves(self, container: Container) -> bool:
        if container.address:
            return container.address == self.socket
        is_sibling = os.path.dirname(container.bundle) == os.path.dirname(self.bundle)
        return is_sibling and self.group == container.group


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A process with the name of a shim."""

    procfs: Procfs
    words: Sequence[str]
    status: Status
    owner: int
    is_quick: bool  # whether to skip what takes long

    def flag(self, name: str) -> str:
        """Return the value of a flag after the program's name; "" if it is missing."""
        return dict(pairwise(self.words)).get(name, "")

    def own(self, path: str) -> int:
        """Return the inode of a path on the host if only its user or root can change it.

        Returns:
            Otherwise return 0, also for a file system that another machine or process serves.
        """
        if not self.procfs.is_local(path):
            return 0
        try:
            seen = os.lstat(path)
        except OSError:
            return 0
        if seen.st_uid not in {0, self.owner} or seen.st_mode & _OTHERS_MAY_WRITE:
            return 0
        return seen.st_ino

    def confirmed(self, kind: str, **more: Any) -> ShimProcess:
        """Return the process that it has proved to be."""
        pid = self.status.pid
        return ShimProcess(
            pid=pid,
            kind=kind,
            uid=self.owner,
            address=self.flag("-address"),
            age=self.status.age,
            memory=None if self.is_quick else self.procfs.memory(pid),
            tree=None if self.is_quick else tree_of(self.procfs, pid),
            **more,
        )


def _namespaces(procfs: Procfs, pid: int) -> list[str]:
    return [procfs.namespace(pid, kind) for kind in _NAMESPACES]


def find_shims(proc: str = "/proc", *, quick: bool = False) -> list[ShimProcess]:
    """Return the shims, fork servers and spares of root and of the caller, by kind and pid.

    Args:
        proc: the mount point of procfs.
        quick: skip whatever takes long: memory, trees, and shims whose bundles were removed.
    """
    procfs = Procfs(proc)
    named = {each.status.pid: each for each in _candidates(procfs, is_quick=quick)}
    pairs = [(server, each) for each in named.values() if (server := _fork_server(each))]
    servers = _Servers.of(pairs)
    found = [server for server, _ in pairs]
    known = {server.pid for server in found}
    for pid, candidate in named.items():
        if pid in known:
            continue
        one = _spare(candidate, servers)
        # A shim forks short-lived children, which are not shims.
        if one is None and candidate.status.parent not in named:
            one = _shim(candidate, servers)
        if one is not None:
            found.append(one)
    order = [SHIM, FORK_SERVER, SPARE]
    return sorted(found, key=lambda each: (order.index(each.kind), each.pid))


def _candidates(procfs: Procfs, *, is_quick: bool) -> Iterator[_Candidate]:
    """Yield the processes of root or the caller, outside of containers, with our program's name.

    On a hardened kernel a shim cannot change the name and command line of the verb that it was
    forked from, which are those of an interpreter with the path of our program.
    """
    trusted = {0, os.geteuid()}
    for pid in procfs.pids():
        status, owner = procfs.status(pid), procfs.owner(pid)
        if status is None or owner not in trusted or status.is_zombie or status.is_kernel:
            continue
        if not procfs.is_own(pid) and (
            procfs.is_contained(pid) or not status.name.startswith(_NAMES)
        ):
            continue
        words = procfs.words(pid)
        if any(os.path.basename(word) in {PROGRAM, f"{PROGRAM}.py"} for word in words[:3]):
            yield _Candidate(procfs, words, status, owner, is_quick)


@dataclass(frozen=True, slots=True)
class _Servers:
    """The fork servers, for lookup."""

    by_stack: Mapping[int, tuple[ShimProcess, _Candidate]]
    # the start time of the first one, by the address of its containerd
    first: Mapping[str, int]

    @classmethod
    def of(cls, pairs: Iterable[tuple[ShimProcess, _Candidate]]) -> _Servers:
        by_stack: dict[int, tuple[ShimProcess, _Candidate]] = {}
        first: dict[str, int] = {}
        for server, its in pairs:
            if its.status.stack:
                by_stack.setdefault(its.status.stack, (server, its))
            time = its.status.start_time
            first[server.address] = min(time, first.get(server.address, time))
        return cls(by_stack, first)

    def forked(self, candidate: _Candidate) -> tuple[ShimProcess, _Candidate] | None:
        """Return the server that has forked a process."""
        return self.by_stack.get(candidate.status.stack)


def _is_warm(candidate: _Candidate, servers: _Servers) -> bool | None:
    """Whether a fork server has forked a shim; None if that server may have exited."""
    if servers.forked(candidate):
        return True
    its, first = candidate.status, servers.first.get(candidate.flag("-address"))
    # A fork server ran before this shim, and did not fork it.
    return False if its.stack and first is not None and first <= its.start_time else None


def _shim(candidate: _Candidate, servers: _Servers) -> ShimProcess | None:
    procfs, pid = candidate.procfs, candidate.status.pid
    directory = procfs.link(pid, "cwd")
    if os.path.basename(os.path.dirname(os.path.dirname(directory))) != TASKS:
        return None
    if directory.endswith(DELETED):
        return _left_shim(candidate, servers)
    if not candidate.own(directory) or not procfs.is_at(pid, directory):
        return None
    container = read_container(directory, procfs)
    if container is None or container.address not in procfs.listening(pid):
        return None
    return candidate.confirmed(
        SHIM,
        namespace=container.namespace,
        group=container.group,
        socket=container.address,
        bundle=directory,
        warm=_is_warm(candidate, servers),
        is_abroad=_is_abroad(procfs, pid),
    )


def _is_abroad(procfs: Procfs, pid: int) -> bool:
    """Whether a process has another user or pid namespace than the node; False if unknown.

    Mounts do not matter: in MicroK8s, containerd and its shims have their own.
    """
    kinds = ("user", "pid")
    # Without privileges, the first process is hidden. Another procfs does not have this process.
    for one in (1, os.getpid()) if procfs.path == "/proc" else (1,):
        home = [procfs.namespace(one, kind) for kind in kinds]
        if "" not in home:
            return home != [procfs.namespace(pid, kind) for kind in kinds]
    return False


def _left_shim(candidate: _Candidate, servers: _Servers) -> ShimProcess | None:
    """Return a shim whose bundle was removed: its owner and namespaces prove it."""
    procfs = candidate.procfs
    own = _namespaces(procfs, os.getpid())
    is_at_home = "" not in own and own == _namespaces(procfs, candidate.status.pid)
    if candidate.owner not in {0, os.geteuid()} or not is_at_home:
        return None
    shim = candidate.confirmed(
        SHIM,
        namespace=candidate.flag("-namespace"),
        group=candidate.flag("-id"),
        warm=_is_warm(candidate, servers),
    )
    return shim if shim.tree is not None else None


def _fork_server(candidate: _Candidate) -> ShimProcess | None:
    if candidate.words[-1] != FORK_SERVER or SPARE_FLAG in candidate.words:
        return None
    procfs, pid = candidate.procfs, candidate.status.pid
    numbers = {path: number for number, path in procfs.descriptors(pid).items()}
    for address in procfs.listening(pid):
        lock = f"{address}.lock"
        if lock not in numbers or not candidate.own(os.path.dirname(address)):
            continue
        inode, file = candidate.own(lock), procfs.open_file(pid, numbers[lock])
        if inode and file is not None and file.inode in {0, inode} and procfs.is_at(pid, lock):
            return candidate.confirmed(FORK_SERVER, socket=address)
    return None


def _spare(candidate: _Candidate, servers: _Servers) -> ShimProcess | None:
    forked_by = servers.forked(candidate)
    if forked_by is None or candidate.words[-2:] != [SPARE_FLAG, FORK_SERVER]:
        return None
    server, parent = forked_by
    # In one mount namespace, equal paths are equal files.
    program, its = (each.procfs.program(each.status.pid) for each in (candidate, parent))
    spaces, theirs = (_namespaces(each.procfs, each.status.pid) for each in (candidate, parent))
    if (candidate.owner, spaces, program) != (parent.owner, theirs, its):
        return None
    return replace(candidate.confirmed(SPARE, warm=True), address=server.address)


def has_shim(pid: int, procfs: Procfs) -> bool:
    """Whether the parent of an init process is a shim. The kernel replaces a parent that dies.

    Returns True for a process that has ended.
    """
    status = procfs.status(pid)
    if status is None:
        return True
    words = procfs.words(status.parent)[:3]
    return any(os.path.basename(word).startswith(_ANY_SHIM) for word in words)


def has_listener(container: Container) -> bool:
    """Whether a shim listens at a container's address, and so can still create its init process."""
    if not container.address:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_TO_ANSWER)
        try:
            probe.connect(container.address)
        except (BlockingIOError, TimeoutError):
            return True  # it is busy: its queue of connections is full
        except OSError:
            return False
    return True


def states_of(shims: Iterable[ShimProcess]) -> list[str]:
    """Return the state directories of the containerds whose shims run.

    Only shims of root and of the caller on the node itself count. Another user or a container can
    run an imitation, which must not decide what root sees.
    """
    trusted = {0, os.geteuid()}
    bundles = [
        each.bundle for each in shims if each.bundle and each.uid in trusted and not each.is_abroad
    ]
    above = [os.path.dirname(os.path.dirname(os.path.dirname(path))) for path in bundles]
    return list(dict.fromkeys(above))


def states_to_watch(named: Iterable[str], proc: str = "/proc") -> tuple[str, ...]:
    """Return the state directories to look at, whether they exist or not.

    Args:
        named: the directories that the user named; if there are none, the known ones and those of
            running shims.
    """
    if paths := tuple(named):
        return state_directories(paths)
    return tuple(dict.fromkeys((*KNOWN_STATES, *states_of(find_shims(proc, quick=True)))))


def all_containers(named: Iterable[str], proc: str = "/proc") -> list[Container]:
    """Return the containers of this node.

    Args:
        named: as for :func:`states_to_watch`.
        proc: the mount point of procfs.

    Raises:
        StateUnreadable: the caller may not read a directory, because it is not root.
    """
    paths = tuple(named)
    states = states_to_watch(paths, proc)
    # Without root's permissions, a known directory that is hidden counts as missing.
    return find_containers(states if paths else filter(os.path.isdir, states), proc)
