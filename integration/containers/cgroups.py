"""Whose a process is: its cgroup, held against those of the containers.

Rules
- A container's cgroup is the one whose name has the container's id in it, above which its init may
  not be; if none has in any hierarchy, those that its init is in and its parent, the shim, is not:
  a hierarchy that the runtime does not manage has all alike. Cgroups below it are its as well.
- A process is a container's if it is in one of its cgroups in any hierarchy: of version 1 some may
  have been left out. The root is nobody's. Where several contain one another (a container in a
  container), the innermost is meant.
- What /proc/PID/cgroup says is relative to the cgroup namespace of who reads it, for all alike.

Source: cgroups(7), cgroup_namespaces(7).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from integration.containers.bundles import Container
    from integration.containers.procfs import Procfs

_Cgroup: TypeAlias = "tuple[str, str]"


def cgroups_in(text: str) -> tuple[_Cgroup, ...]:
    """The cgroups of a process, each with its hierarchy ("" for version 2).

    Args:
        text: what /proc/PID/cgroup has.
    """
    found = []
    for line in text.splitlines():
        _, first, rest = line.partition(":")
        controllers, second, path = rest.partition(":")
        if first and second and path.startswith("/"):
            found.append((controllers, path.removesuffix(" (deleted)")))
    return tuple(found)


def own_cgroup(path: str, container_id: str) -> str:
    """The cgroup of a container whose init is in that one; "" if no name has its id."""
    parts = path.split("/")
    for number, part in enumerate(parts):
        if part == container_id or part.endswith((f"-{container_id}.scope", f":{container_id}")):
            return "/".join(parts[: number + 1])
    return ""


class Owners:
    """The containers by their cgroups.

    Args:
        containers: of the node; those without a process have none.
    """

    def __init__(self, containers: Iterable[Container], procfs: Procfs) -> None:
        self._procfs = procfs
        self._owners: dict[_Cgroup, Container] = {}
        for container in containers:
            for cgroup in self._own(container) if container.pid else ():
                self._owners.setdefault(cgroup, container)

    def _own(self, container: Container) -> list[_Cgroup]:
        cgroups = cgroups_in(self._procfs.text(container.pid, "cgroup"))
        named = [(c, own) for c, path in cgroups if (own := own_cgroup(path, container.id))]
        if named:
            return named
        status = self._procfs.status(container.pid)
        text = "" if status is None else self._procfs.text(status.parent, "cgroup")
        shared = frozenset(cgroups_in(text))
        return [each for each in cgroups if each not in shared and each[1].strip("/.")]

    def of(self, pid: int) -> Container | None:
        """The container of a process; None if it is of none, or gone."""
        return owner_of(cgroups_in(self._procfs.text(pid, "cgroup")), self._owners)


def owner_of(cgroups: Iterable[_Cgroup], owners: Mapping[_Cgroup, Container]) -> Container | None:
    """Whose a process is."""
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
