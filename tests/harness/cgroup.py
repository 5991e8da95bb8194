"""A container's cgroup, read on the host from its own files.

Source: cgroups(7); Linux Documentation/admin-guide/cgroup-v1/devices.rst.
"""

from __future__ import annotations

import os
from typing import Final

_ROOT: Final = "/sys/fs/cgroup"


def is_v2() -> bool:
    """Return whether cgroup v2 has the controllers; on a hybrid host it has only the processes."""
    return os.path.exists(os.path.join(_ROOT, "cgroup.controllers"))


def read_cgroup(pid: int, controller: str, *, v1: str, v2: str) -> str:
    """Read a file of a process's cgroup.

    Args:
        controller: the v1 controller that has the file.
        v2: the file's name in v2.
    """
    paths = {}
    with open(f"/proc/{pid}/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            paths.update(dict.fromkeys(controllers.split(","), path))
    directory = _ROOT + paths[""] if is_v2() else f"{_ROOT}/{controller}{paths[controller]}"
    with open(os.path.join(directory, v2 if is_v2() else v1)) as file:
        return file.read()


def remove_cgroup(directory: str) -> None:
    """Remove a cgroup and those below it, which are all empty."""
    for folder, _, _ in os.walk(directory, topdown=False):
        os.rmdir(folder)
