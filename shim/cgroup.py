"""Which processes a container has, read from its cgroup.

Source: cgroups(7); kernel Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import os
from typing import Final

_ROOT: Final = "/sys/fs/cgroup"

# On cgroup v1 every controller has its own tree; runc joins the container to each, and these
# are the ones that every kernel with containers has.
_V1_CONTROLLERS: Final = ("pids", "devices", "memory", "freezer")


def directory_of(pid: int) -> str | None:
    """The directory of a container's cgroup.

    Args:
        pid: a live process of the container.

    Returns:
        The directory below /sys/fs/cgroup, on cgroup v2 or in one of v1's hierarchies; None
        when the process is gone, or its cgroup is not visible here or is no container's own.
    """
    # A runtime can be told to make no cgroup: then the process stays in ours, or in the root
    # with the whole machine, and what else is in there must not be taken for the container's.
    shared = _paths_of("self")
    by_controller = {
        name: path
        for name, path in _paths_of(pid).items()
        if path != "/" and shared.get(name) != path
    }
    candidates = [
        os.path.join(_ROOT, name, by_controller[name].lstrip("/"))
        for name in _V1_CONTROLLERS
        if name in by_controller
    ]
    if "" in by_controller:
        unified = by_controller[""].lstrip("/")
        candidates += [os.path.join(_ROOT, unified), os.path.join(_ROOT, "unified", unified)]
    for directory in candidates:
        if os.path.exists(os.path.join(directory, "cgroup.procs")):
            return directory
    return None


def _paths_of(pid: int | str) -> dict[str, str]:
    """The path of a process's cgroup by controller; "" is version 2."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return {}
    return {name: path for _, names, path in lines for name in names.split(",")}


def pids_in(directory: str) -> list[int]:
    """The processes in a cgroup and in those below it, in ascending order.

    Args:
        directory: as :func:`directory_of` returns it.

    Returns:
        Their pids; none if the cgroup has gone.
    """
    pids: set[int] = set()
    for folder, _, _ in os.walk(directory):
        try:
            with open(os.path.join(folder, "cgroup.procs"), encoding="ascii") as file:
                pids.update(int(line) for line in file)
        except OSError:
            continue  # removed while we walked
    return sorted(pids)
