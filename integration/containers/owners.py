"""Find the container of a process by its cgroups.

Rules
- A container's cgroup is the one with the container's id in its name, at or above the cgroup of its
  init. If no cgroup has such a name, it is every cgroup of the init that its parent, the shim, is
  not in: all processes share a hierarchy that the runtime does not manage.
- A process belongs to a container if any hierarchy has it at or below a cgroup of the container. In
  version 1 a process may be missing from some hierarchies. The root cgroup belongs to none.
- With nested containers, the innermost one is the owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from integration.containers.bundles import Container
from integration.containers.cgroups import Cgroup, cgroups_in, own_cgroup
from integration.containers.procfs import Procfs


class Owners:
    """Knows the containers of a node by their cgroups.

    Args:
        containers: the containers; those without a process are ignored.
    """

    def __init__(self, containers: Iterable[Container], procfs: Procfs) -> None:
        self._procfs = procfs
        self._owners: dict[Cgroup, Container] = {}
        for container in containers:
            for cgroup in self._own(container) if container.pid else ():
                self._owners.setdefault(cgroup, container)

    def _own(self, container: Container) -> list[Cgroup]:
        cgroups = cgroups_in(self._procfs.cgroup(container.pid))
        named = [(c, own) for c, path in cgroups if (own := own_cgroup(path, container.id))]
        if named:
            return named
        status = self._procfs.status(container.pid)
        text = "" if status is None else self._procfs.cgroup(status.parent)
        shared = frozenset(cgroups_in(text))
        return [each for each in cgroups if each not in shared and each[1].strip("/.")]

    def of(self, pid: int) -> Container | None:
        """Return the container of a process; None if it is in no container, or has ended."""
        return owner_of(cgroups_in(self._procfs.cgroup(pid)), self._owners)


def owner_of(cgroups: Iterable[Cgroup], owners: Mapping[Cgroup, Container]) -> Container | None:
    """Return the container of a process with these cgroups."""
    best: tuple[int, Container] | None = None
    for controllers, path in cgroups:
        while path.strip("/."):
            found = owners.get((controllers, path))
            if found is not None:
                depth = path.count("/")
                if best is None or depth > best[0]:
                    best = (depth, found)
                break
            path = path.rpartition("/")[0]  # noqa: PLW2901 - upwards
    return None if best is None else best[1]
