"""The cgroups of a process, as the kernel prints them.

A path in /proc/PID/cgroup is relative to the cgroup namespace of the reader, so paths that one
reader has read can be compared.

Source: cgroups(7), cgroup_namespaces(7).
"""

from __future__ import annotations

from typing import TypeAlias

Cgroup: TypeAlias = "tuple[str, str]"
"""Its hierarchy ("" for version 2) and its path."""


def cgroups_in(text: str) -> tuple[Cgroup, ...]:
    """Return the cgroups in the text of /proc/PID/cgroup."""
    found = []
    for line in text.split("\n"):  # a name may contain other control characters
        _, first, rest = line.partition(":")
        controllers, second, path = rest.partition(":")
        if first and second and path.startswith("/"):
            found.append((controllers, path.removesuffix(" (deleted)")))
    return tuple(found)


def own_cgroup(path: str, container_id: str) -> str:
    """Return the cgroup with the container's id at or above a path; "" if there is none."""
    parts = path.split("/")
    for number, part in enumerate(parts):
        if part == container_id or part.endswith((f"-{container_id}.scope", f":{container_id}")):
            return "/".join(parts[: number + 1])
    return ""
