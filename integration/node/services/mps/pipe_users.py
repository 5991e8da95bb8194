"""Which containers have the pipes of a daemon: who may become a client at any moment.

Those of containerd are told by their bundles, so also one that was made and not started yet is
known. Those of other engines (Docker, CRI-O, Podman) the kernel tells: a process with mounts of its
own, among which the pipe directory is. So one that has not called CUDA yet is known, too; a daemon
itself knows of neither.

Source: proc_pid_mountinfo(5), mount_namespaces(7).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator

from integration.containers.bundles import Container
from integration.containers.errors import InspectionError
from integration.containers.procfs import Procfs
from integration.containers.shims import all_containers
from integration.node.mps.paths import Places
from integration.node.services.mps.host_setup import mounts_of
from shim.errors import BundleUnusable

UNKNOWN = "containers that could not be read"

_NAMESPACE = "ns/mnt"


def users_of(places: Places, states: Iterable[str]) -> tuple[str, ...]:
    """The containers, and other processes with mounts of their own, that have a pipe directory.

    Args:
        states: containerd's state directories; none for those that are known.

    Returns:
        What people call them; :data:`UNKNOWN` stands for those that could not be read.
    """
    try:
        containers = all_containers(states)
    except InspectionError:
        return (UNKNOWN,)
    users = [each for each in containers if _has(each, places.pipe)]
    procfs = Procfs()
    known = {procfs.link(each.pid, _NAMESPACE) for each in users if each.pid}
    pipe = frozenset(_places(os.path.realpath(places.pipe)))
    others = (
        f"process {pid} ({procfs.text(pid, 'comm').rstrip()})"
        for namespace, pids in _namespaces(procfs).items()
        if namespace not in known and (pid := _one_with(pipe, pids))
    )
    return (*(each.title for each in users), *others)


def _namespaces(procfs: Procfs) -> dict[str, list[int]]:
    """The processes of each mount namespace that is not ours."""
    found: dict[str, list[int]] = {}
    for pid in procfs.pids():
        namespace = procfs.link(pid, _NAMESPACE)
        if namespace:
            found.setdefault(namespace, []).append(pid)
    found.pop(procfs.link(os.getpid(), _NAMESPACE), None)
    return found


def _one_with(places: Collection[tuple[str, str]], pids: Iterable[int]) -> int:
    """One of the processes of a namespace, if a directory is mounted there as such; 0 if not."""
    for pid in pids:
        try:
            mounts = mounts_of(str(pid))
        except OSError:  # it has just ended, and others may go on
            continue
        return pid if any((words[2], words[3]) in places for words in mounts) else 0
    return 0


def _places(path: str) -> Iterator[tuple[str, str]]:
    """Where a path lies in its file system: the device, and the path there.

    Of several mounts that it may be below each counts: one that another covers is never mounted
    elsewhere by that path.
    """
    for words in mounts_of():
        point = words[4].rstrip("/")
        if path == point or path.startswith(f"{point}/"):
            yield words[2], words[3].rstrip("/") + path.removeprefix(point)


def _has(container: Container, pipe: str) -> bool:
    try:
        mounts = container.spec().get("mounts")
    except BundleUnusable:
        return False  # it has just gone
    return isinstance(mounts, list) and any(
        isinstance(mount, dict) and mount.get("source") == pipe for mount in mounts
    )
