"""The shims of this node, and the processes that fork them.

Any process can call itself ``containerd-shim-nvidia-v1``, one in a container too, and its command
line and the addresses of its sockets are its own words. So a name only makes a process worth a
look, and it is believed for what nobody else can have:

============  ================================================================================
a shim        has the directory of a bundle as its own (by the place in its file system that the
              kernel prints), in which only its user may write, and listens where that bundle's
              ``address`` says; one that has outlived its bundle is root's (or the caller's), in
              the namespaces of who asks, and has our code mapped. Where containers are, only one
              says that is in the node's own pid and user namespaces
a fork        holds open the lock beside the socket that it listens on (by its place and inode), in
server        a directory of sockets of its user's alone
a spare       is of the user, program, mount, user and pid namespaces of a fork server, and was
              forked from it: its stack begins at the same place, which is random in others
============  ================================================================================

A process of another user, or in a container
(:meth:`~integration.containers.procfs.Procfs.is_contained`), is not looked at: it serves nothing of
this node, and can make a look take as long as it likes.

Which version it is, its memory says: the files of its tree that are mapped, also when they have
been removed meanwhile. A shim was started warm if it was forked from a fork server; it is not known
if that has ended.

Source: proc(5); :mod:`shim.verbs.handover` and :mod:`shim.forkserver` for the command
lines.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

from hooks.config import Config
from integration.containers.bundles import (
    TASKS,
    Container,
    find_containers,
    read_container,
    state_directories,
)
from integration.containers.errors import StateUnreadable
from integration.containers.exit_causes import causes_of, find_ends
from integration.containers.held_devices import Holders, indexes_of, inventory_for
from integration.containers.procfs import DELETED, Procfs, Status
from integration.containers.records import entries, strings
from integration.containers.trees import Tree, is_current, tree_of
from shim import PROGRAM

SHIM: Final = "shim"
FORK_SERVER: Final = "fork-server"
SPARE: Final = "spare"

# What the kernel calls a shim, or its interpreter, or the loader of that.
_NAMES: Final = (PROGRAM[:15], "python", "ld-")
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_NAMESPACES: Final = ("ns/mnt", "ns/user", "ns/pid")


@dataclass(frozen=True, slots=True)
class OurProcess:
    """A process of ours."""

    pid: int  # which
    kind: str  # SHIM, FORK_SERVER or SPARE
    uid: int  # whose it is: root's, or the caller's
    address: str  # of containerd, as it says
    namespace: str = ""  # of containerd; "" but for a shim
    group: str = ""  # the id that it was started for: of a pod's sandbox, or a container
    socket: str = ""  # where it listens; "" for a spare
    bundle: str = ""  # its directory; "" but for a shim, and for one that has outlived it
    age: float = field(default=0.0, compare=False)  # seconds since it was started
    # PSS and USS in bytes; None if they cannot be read
    memory: tuple[int, int] | None = field(default=None, compare=False)
    tree: Tree | None = None  # what it was started from; None if that is not known
    warm: bool | None = None  # whether it was forked from a fork server; None if that is not known
    is_abroad: bool = False  # whether it is in a pid or user namespace that is not the node's

    def of(self, containers: Iterable[Container]) -> list[Container]:
        """The containers that a shim serves, of some."""
        if not self.bundle:
            return []
        return [c for c in containers if c.namespace == self.namespace and self._serves(c)]

    def _serves(self, container: Container) -> bool:
        if container.address:
            return container.address == self.socket
        beside = os.path.dirname(container.bundle) == os.path.dirname(self.bundle)
        return beside and self.group == container.group


class _Glance(Procfs):
    """A procfs of which what takes long is not read."""

    def memory(self, pid: int) -> tuple[int, int] | None:
        del pid
        return None

    def mapped(self, pid: int) -> list[str]:
        del pid
        return []


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A process that calls itself one of ours."""

    procfs: Procfs
    words: Sequence[str]
    status: Status
    owner: int

    def flag(self, name: str) -> str:
        """The value of a flag that follows the program's name; "" if it is not given."""
        return dict(pairwise(self.words)).get(name, "")

    def namespaces(self) -> list[str]:
        return [self.procfs.link(self.status.pid, name) for name in _NAMESPACES]

    def own(self, path: str) -> int:
        """The inode of what is at a path of the host, if it is the user's, or root's, alone.

        Returns:
            0 for a file of others, and for one on a file system that needs another to answer.
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

    def believed(self, kind: str, **more: Any) -> OurProcess:
        """It, once it is known for what it says that it is."""
        pid = self.status.pid
        return OurProcess(
            pid=pid,
            kind=kind,
            uid=self.owner,
            address=self.flag("-address"),
            age=self.status.age,
            memory=self.procfs.memory(pid),
            tree=tree_of(self.procfs, pid),
            **more,
        )


def find_processes(proc: str = "/proc", *, glance: bool = False) -> list[OurProcess]:
    """The shims, fork servers and spares that run.

    Args:
        proc: where procfs is.
        glance: leave out what takes long: memory, trees, and shims that have outlived their
            bundles.

    Returns:
        The processes that are what they say, by kind and pid: those of root and of the caller.
    """
    procfs = _Glance(proc) if glance else Procfs(proc)
    named = {each.status.pid: each for each in _candidates(procfs)}
    pairs = [(server, each) for each in named.values() if (server := _fork_server(each))]
    servers = _Servers.of(pairs)
    found = [server for server, _ in pairs]
    known = {server.pid for server in found}
    for pid, candidate in named.items():
        if pid in known:
            continue
        one = _spare(candidate, servers)
        # A process that a shim has forked for a moment is no shim.
        if one is None and candidate.status.parent not in named:
            one = _shim(candidate, servers)
        if one is not None:
            found.append(one)
    order = [SHIM, FORK_SERVER, SPARE]
    return sorted(found, key=lambda each: (order.index(each.kind), each.pid))


def _candidates(procfs: Procfs) -> Iterator[_Candidate]:
    """The processes that are worth a look: of root or the caller, and in no container.

    A hardened kernel does not let a shim change the name and the command line of the verb that it
    was forked from: an interpreter, with the path of our program.
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
            yield _Candidate(procfs, words, status, owner)


@dataclass(frozen=True, slots=True)
class _Servers:
    """The fork servers."""

    by_stack: Mapping[int, tuple[OurProcess, _Candidate]]
    # by the address of its containerd, when the first of them was started
    first: Mapping[str, int]

    @classmethod
    def of(cls, pairs: Iterable[tuple[OurProcess, _Candidate]]) -> _Servers:
        by_stack: dict[int, tuple[OurProcess, _Candidate]] = {}
        first: dict[str, int] = {}
        for server, its in pairs:
            if its.status.stack:
                by_stack.setdefault(its.status.stack, (server, its))
            time = its.status.start_time
            first[server.address] = min(time, first.get(server.address, time))
        return cls(by_stack, first)

    def forked(self, candidate: _Candidate) -> tuple[OurProcess, _Candidate] | None:
        """The server that has forked a process."""
        return self.by_stack.get(candidate.status.stack)


def _is_warm(candidate: _Candidate, servers: _Servers) -> bool | None:
    """Whether a fork server has forked a shim; None if it may have ended since."""
    if servers.forked(candidate):
        return True
    its, first = candidate.status, servers.first.get(candidate.flag("-address"))
    # One that was there before, and has not forked it: nobody else does.
    return False if its.stack and first is not None and first <= its.start_time else None


def _shim(candidate: _Candidate, servers: _Servers) -> OurProcess | None:
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
    return candidate.believed(
        SHIM,
        namespace=container.namespace,
        group=container.group,
        socket=container.address,
        bundle=directory,
        warm=_is_warm(candidate, servers),
        is_abroad=_is_abroad(procfs, pid),
    )


def _is_abroad(procfs: Procfs, pid: int) -> bool:
    """Whether a process is in other namespaces than the node's first; False if that is not known.

    Where containerd has mounts of its own (MicroK8s), shims have, too.
    """
    names = ("ns/user", "ns/pid")
    # The first process is not everybody's to look at; and another procfs has no self.
    for one in (1, os.getpid()) if procfs.path == "/proc" else (1,):
        home = [procfs.link(one, name) for name in names]
        if "" not in home:
            return home != [procfs.link(pid, name) for name in names]
    return False


def _left_shim(candidate: _Candidate, servers: _Servers) -> OurProcess | None:
    """A shim whose bundle is gone; so it is told by whose it is, and where it runs."""
    procfs = candidate.procfs
    own = [procfs.link(os.getpid(), name) for name in _NAMESPACES]
    is_at_home = "" not in own and own == candidate.namespaces()
    if candidate.owner not in {0, os.geteuid()} or not is_at_home:
        return None
    shim = candidate.believed(
        SHIM,
        namespace=candidate.flag("-namespace"),
        group=candidate.flag("-id"),
        warm=_is_warm(candidate, servers),
    )
    return shim if shim.tree is not None else None


def _fork_server(candidate: _Candidate) -> OurProcess | None:
    if candidate.words[-1] != FORK_SERVER or "-spare" in candidate.words:
        return None
    procfs, pid = candidate.procfs, candidate.status.pid
    numbers = {path: number for number, path in procfs.descriptors(pid).items()}
    for socket in procfs.listening(pid):
        lock = f"{socket}.lock"
        if lock not in numbers or not candidate.own(os.path.dirname(socket)):
            continue
        inode, file = candidate.own(lock), procfs.open_file(pid, numbers[lock])
        if inode and file is not None and file.inode in {0, inode} and procfs.is_at(pid, lock):
            return candidate.believed(FORK_SERVER, socket=socket)
    return None


def _spare(candidate: _Candidate, servers: _Servers) -> OurProcess | None:
    forked_by = servers.forked(candidate)
    if forked_by is None or candidate.words[-2:] != ["-spare", FORK_SERVER]:
        return None
    server, parent = forked_by
    # Of one mount namespace, so what is called alike is the same.
    program, its = (each.procfs.link(each.status.pid, "exe") for each in (candidate, parent))
    alike = candidate.owner == parent.owner and candidate.namespaces() == parent.namespaces()
    if not alike or program != its:
        return None
    return replace(candidate.believed(SPARE, warm=True), address=server.address)


def states_of(processes: Iterable[OurProcess]) -> list[str]:
    """The state directories of the containerds whose shims run.

    Of root's and the caller's own on the node itself, that is: another user, or a container, can
    run what looks like a shim, and must not tell root who has which GPU.

    Args:
        processes: what :func:`find_processes` found.
    """
    trusted = {0, os.geteuid()}
    bundles = [
        each.bundle
        for each in processes
        if each.bundle and each.uid in trusted and not each.is_abroad
    ]
    above = [os.path.dirname(os.path.dirname(os.path.dirname(path))) for path in bundles]
    return list(dict.fromkeys(above))


def all_containers(asked: Iterable[str], proc: str = "/proc") -> list[Container]:
    """The containers of this node.

    Args:
        asked: the state directories that somebody named; if none, those that are known, and
            those of the shims that run.
        proc: where procfs is.

    Raises:
        StateUnreadable: a directory may not be read: the caller is not root.
    """
    named = tuple(asked)
    if named:
        return find_containers(state_directories(named), proc)
    known = [*state_directories(), *states_of(find_processes(proc))]
    return find_containers(dict.fromkeys(known), proc)


def list_processes(
    asked: Iterable[str], proc: str = "/proc", config: Config | None = None
) -> list[dict[str, Any]]:
    """What ``nvshim ps`` says.

    Args:
        asked: as for :func:`all_containers`.
        proc: where procfs is.
        config: where the node's devices are; None if that is not known, and then records tell.

    Returns:
        An object for each process; the keys are an interface.

    Raises:
        StateUnreadable: a directory that somebody named may not be read.
    """
    processes, named = find_processes(proc), tuple(asked)
    try:
        containers = all_containers(named, proc)
    except StateUnreadable:
        if named:
            raise
        containers = find_containers(states_of(processes), proc)  # of one's own
    inventory = None if config is None else inventory_for(config, containers)
    holders = Holders(config, inventory)
    indexes = {**_recorded_indexes(containers), **indexes_of(inventory)}
    causes = {} if config is None else causes_of(containers, find_ends(config.state))
    by_socket: dict[tuple[str, str], list[Container]] = {}
    for each in containers:
        by_socket.setdefault((each.namespace, each.address), []).append(each)
    rows = []
    for process in processes:
        # That of one that is being made is not known yet.
        served = [
            container
            for socket in dict.fromkeys((process.socket, ""))
            for container in by_socket.get((process.namespace, socket), ())
        ]
        rows.append(process_row(process, served, holders, indexes, causes))
    return rows


def _recorded_indexes(containers: Iterable[Container]) -> dict[str, str]:
    """As :func:`indexes_of`, of what containers were given, when they were given it."""
    found = {}
    for record in (container.record for container in containers):
        for gpu in entries(record, "grant", "gpus"):
            found[str(gpu.get("uuid") or gpu.get("bus_id"))] = str(gpu.get("index"))
        for device in entries(record, "grant", "mig_devices"):
            found[str(device.get("uuid"))] = f"{device.get('gpu')}:{device.get('index')}"
    return found


def process_row(
    process: OurProcess,
    containers: Iterable[Container],
    holders: Holders | None = None,
    indexes: Mapping[str, str] | None = None,
    causes: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What ``nvshim ps`` says of a process.

    Args:
        process: which.
        containers: those of the node.
        holders: who holds what; None for what records say.
        indexes: of the node's devices, by UUID; None if they are not known.
        causes: by bundle, why containers have ended; None if that is not known.

    Returns:
        Plain values; the keys are an interface.
    """
    served = process.of(containers)
    held = {c.bundle: _held(c, holders) for c in served}
    pods = [c.pod for c in served if c.pod is not None]
    gpus = list(dict.fromkeys(name for c in served for name in held[c.bundle]))
    tree = process.tree
    return {
        "pid": process.pid,
        "kind": process.kind,
        "uid": process.uid,
        "namespace": process.namespace or None,
        "id": process.group or None,
        "pod": {"namespace": pods[0].namespace, "name": pods[0].name} if pods else None,
        "containers": [
            {**c.to_json(), "gpus": held[c.bundle], "cause": (causes or {}).get(c.bundle)}
            for c in served
            if not c.sandbox
        ],
        "gpus": gpus,
        "gpu_indexes": [(indexes or {}).get(name) for name in gpus],
        "memory": None
        if process.memory is None
        else {"pss_bytes": process.memory[0], "uss_bytes": process.memory[1]},
        "version": (tree.version or None) if tree else None,
        "tree": tree.path if tree else None,
        "current": is_current(tree) if tree else None,
        "warm": process.warm,
        "age_seconds": round(process.age, 1),
        "containerd": process.address or None,
        "socket": process.socket or None,
        "bundle": process.bundle or None,
    }


def _held(container: Container, holders: Holders | None) -> list[str]:
    named = held_names(container.record)
    if named or holders is None or container.sandbox or not container.pid:
        return named
    return list(holders.devices_of(container))


def held_names(record: Mapping[str, Any] | None) -> list[str]:
    """The UUIDs of what a container was given; of what has none, what it is called.

    Args:
        record: of its injection; None for nothing.
    """
    held = [*entries(record, "grant", "gpus"), *entries(record, "grant", "mig_devices")]
    names = [entry.get("uuid") or entry.get("bus_id") or "" for entry in held]
    for vendor in entries(record, "vendors"):
        names += strings(vendor, "granted")
    return [name for name in names if name and isinstance(name, str)]
