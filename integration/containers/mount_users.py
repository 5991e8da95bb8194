"""The processes in other mount namespaces that have a directory of the node mounted.

The kernel lists the mounts of containers of any engine, even before they use what is mounted.

Source: proc_pid_mountinfo(5), mount_namespaces(7).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from integration.containers.procfs import Procfs, places_of


def mount_users(path: str, besides: Iterable[int] = ()) -> Iterator[tuple[int, str]]:
    """Yield one process, with its name, for each mount namespace that has a directory mounted.

    Args:
        path: the directory, which must be a mount point in the other namespace.
        besides: processes whose namespaces are skipped.
    """
    procfs = Procfs()
    places = set(places_of(os.path.realpath(path), procfs.mounts()))
    skipped = {procfs.namespace(pid, "mnt") for pid in (os.getpid(), *besides)}
    for namespace, pids in _by_namespace(procfs).items():
        if namespace not in skipped:
            # A process may have just exited; the others of its namespace have the same mounts.
            mounts = ((pid, mounts) for pid in pids if (mounts := procfs.mounts(pid)))
            pid, those = next(mounts, (0, []))
            if any((mount.device, mount.root) in places for mount in those):
                yield pid, procfs.name(pid)


def _by_namespace(procfs: Procfs) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for pid in procfs.pids():
        if namespace := procfs.namespace(pid, "mnt"):
            found.setdefault(namespace, []).append(pid)
    return found
