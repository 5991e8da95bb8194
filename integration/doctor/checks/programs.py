"""Versions of other people's programs, and their known vulnerabilities: D020 to D025."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from integration.doctor.advisories import OLDEST, affecting, parse_version
from integration.doctor.facts import seen
from integration.doctor.findings import Check, Severity, Trouble, listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.doctor.facts import Node

__all__ = ["PROGRAMS"]

_ERROR, _WARNING = Severity.ERROR, Severity.WARNING


def _vulnerable(name: str, node: Node) -> Iterator[Trouble]:
    for program in seen(node.programs):
        if program.name != name:
            continue
        left = [a for a in affecting(name, program.version) if a.cve not in program.fixed]
        if not left:
            continue
        severe = [a for a in left if a.severe]
        # The worst first: a long list is cut.
        told = listed(f"{a.cve} ({a.what})" for a in (*severe, *(a for a in left if not a.severe)))
        found = f"{program.path} is {program.version}: {told}"
        newest = max((f for a in left for f in a.fixed), key=lambda f: parse_version(f) or ())
        if program.package:
            yield Trouble(
                f"{found}; it is of the package {program.package} {program.package_version}, whose "
                "changelog does not name these, but its distribution may have fixed them",
                severity=_WARNING,
                remedy=f"see whether the distribution has fixed them, and update {program.package}",
            )
        else:
            yield Trouble(
                found,
                severity=_ERROR if severe else _WARNING,
                remedy=f"update {name} to {newest} or newer",
            )


def _silent(node: Node) -> Iterator[Trouble]:
    for program in seen(node.programs):
        if program.fault:
            yield Trouble(f"{program.path}: {program.fault}")


def _old(node: Node) -> Iterator[Trouble]:
    for program in seen(node.programs):
        version, oldest = parse_version(program.version), OLDEST.get(program.name, "")
        least = parse_version(oldest)
        if version is not None and least is not None and version < least:
            yield Trouble(f"{program.path} is {program.version}; {oldest} is the oldest that works")


_NEEDS: Final = ("programs",)

PROGRAMS: Final = (
    *(
        Check(
            code=code,
            severity=_WARNING,
            title=f"{name} has known vulnerabilities",
            why=why,
            remedy=f"update {name}",
            reference=reference,
            needs=_NEEDS,
            look=partial(_vulnerable, name),
        )
        for code, name, why, reference in (
            (
                "NVSHIM-D020",
                "runc",
                "It sets up what confines a container; we mount before it, and cannot mend it.",
                "https://github.com/opencontainers/runc/security/advisories",
            ),
            (
                "NVSHIM-D021",
                "crun",
                "It sets up what confines a container; we mount before it, and cannot mend it.",
                "https://github.com/containers/crun/security/advisories",
            ),
            (
                "NVSHIM-D022",
                "containerd",
                "It unpacks images and serves the kubelet as root.",
                "https://github.com/containerd/containerd/security/advisories",
            ),
            (
                "NVSHIM-D023",
                "nvidia-container-toolkit",
                "It is installed beside us, and its hooks run as root on what an image says.",
                "https://www.nvidia.com/en-us/security/",
            ),
        )
    ),
    Check(
        code="NVSHIM-D024",
        severity=_WARNING,
        title="a program does not say its version",
        why="It is broken, built for another machine, or no such program at all.",
        remedy="see what it prints with --version, and install it anew",
        needs=_NEEDS,
        look=_silent,
    ),
    Check(
        code="NVSHIM-D025",
        severity=_ERROR,
        title="a program is older than what this project works with",
        why="Nothing is tested with it.",
        remedy="update it",
        needs=_NEEDS,
        look=_old,
    ),
)
