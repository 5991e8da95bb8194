"""Versions of runtimes and engines, and their known vulnerabilities: D020 to D025."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from integration.doctor.advisories import OLDEST, affecting, parse_version
from integration.doctor.facts import Program
from integration.doctor.findings import ERROR, WARNING, Check, Trouble, check, listed


def _vulnerable(program: Program, called: str) -> Iterator[Trouble]:
    left = [a for a in affecting(program.name, program.version) if a.cve not in program.fixed]
    if not left:
        return
    # The worst first, because a long list is cut.
    cves = listed(f"{a.cve} ({a.what})" for a in sorted(left, key=lambda a: not a.severe))
    found = f"{program.path} is {program.version}: {cves}"
    newest = max((f for a in left for f in a.fixed), key=lambda f: parse_version(f) or ())
    line = f"{called} {program.version}: {len(left)} known CVE{'s' if len(left) > 1 else ''}"
    if program.package:
        yield Trouble(
            f"{found}; the changelog of the package {program.package} {program.package_version} "
            "does not name them, but the distribution may have fixed them",
            severity=WARNING,
            remedy=f"check whether the distribution has fixed them, and update {program.package}",
            line=f"{line}, unless its package fixed them",
        )
    else:
        yield Trouble(
            found,
            severity=ERROR if any(a.severe for a in left) else WARNING,
            remedy=f"update {program.name} to {newest} or newer",
            line=f"{line}; update to {newest}",
        )


def _vulnerabilities(name: str, code: str) -> Check:
    """Return the check for one program."""

    @check(code)
    def look(programs: tuple[Program, ...]) -> Iterator[Trouble]:
        found = [program for program in programs if program.name == name]
        for program in found:
            yield from _vulnerable(program, name if len(found) == 1 else program.path)

    return look


_RUNC = _vulnerabilities("runc", "D020")
_CRUN = _vulnerabilities("crun", "D021")
_CONTAINERD = _vulnerabilities("containerd", "D022")
_TOOLKIT = _vulnerabilities("nvidia-container-toolkit", "D023")


@check("D024")
def _silent(programs: tuple[Program, ...]) -> Iterable[str]:
    return (f"{program.path}: {program.fault}" for program in programs if program.fault)


@check("D025")
def _old(programs: tuple[Program, ...]) -> Iterator[str]:
    for program in programs:
        version, oldest = parse_version(program.version), OLDEST.get(program.name, "")
        least = parse_version(oldest)
        if version is not None and least is not None and version < least:
            yield f"{program.path} is {program.version}; {oldest} is the oldest supported version"
