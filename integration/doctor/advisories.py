"""Known vulnerabilities of the programs that containers are run with, as data.

Rules
- ``fixed`` names the first version of each branch that has the fix. A version is affected if it is
  not below ``since``, is older than the newest of them, and is of none of their branches, or of one
  and older than that branch's.
- A distribution fixes vulnerabilities without changing the version that the program says. So what
  a package's own changelog names as fixed does not count, and of the rest of a package's program
  it is said that the distribution may have fixed it.
- Only what concerns containers on a node is here, and only what was made public by the program's
  own project or vendor.

Source: CHANGELOG of runc; NEWS and security advisories of crun; security advisories of containerd
(GHSA-…) and their entries in the CVE list; NVIDIA's security bulletins 5582, 5585, 5599, 5616,
5659 and 5850 with the toolkit's release notes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

Version = tuple[int, int, int, int, int]
"""Major, minor, patch, stage (alpha 0, beta 1, candidate 2, release 3), number of the stage."""

_VERSION: Final = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:[-~](alpha|beta|rc)[.-]?(\d+))?")
_STAGES: Final = {"alpha": 0, "beta": 1, "rc": 2, None: 3}


@dataclass(frozen=True, slots=True)
class Advisory:
    """A vulnerability."""

    cve: str  # its number
    program: str  # whose
    fixed: tuple[str, ...]  # the first version of each branch that has the fix
    what: str  # what an attacker gets, in some words
    severe: bool = False  # whether it lets a container out, or into another
    since: str = ""  # the first version that has it; "" for all


OLDEST: Final = {"runc": "1.1.0", "crun": "1.8.0", "containerd": "1.6.0"}
"""The oldest versions that this project is made for."""

_TRIO: Final = ("1.2.8", "1.3.3", "1.4.0-rc.3")
_JUNE: Final = ("2.1.9", "2.2.5", "2.3.2")

ADVISORIES: Final = (
    Advisory("CVE-2022-29162", "runc", ("1.1.2",), "inheritable capabilities of execs"),
    Advisory("CVE-2023-27561", "runc", ("1.1.5",), "masks of /proc by a link at /proc"),
    Advisory("CVE-2023-28642", "runc", ("1.1.5",), "AppArmor and SELinux by a link at /proc"),
    Advisory(
        "CVE-2024-21626", "runc", ("1.1.12", "1.2.0-rc.1"),
        "a working directory on the host, by a descriptor that was left open", severe=True,
    ),
    Advisory("CVE-2024-45310", "runc", ("1.1.14", "1.2.0-rc.3"), "empty files made on the host"),
    Advisory("CVE-2025-31133", "runc", _TRIO, "masked paths, by a link at /dev/null", severe=True),
    Advisory("CVE-2025-52565", "runc", _TRIO, "the mount of /dev/console", severe=True),
    Advisory("CVE-2025-52881", "runc", _TRIO, "writes to procfs sent elsewhere", severe=True),
    Advisory(
        "CVE-2026-41579", "runc", ("1.3.6", "1.4.3", "1.5.0-rc.3"),
        "links made on the host, by an image whose /dev is a link",
    ),
    Advisory("CVE-2022-27650", "crun", ("1.4.4",), "inheritable capabilities of execs"),
    Advisory("CVE-2025-24965", "crun", ("1.20",), "files written on the host by the krun handler"),
    Advisory("CVE-2026-30892", "crun", ("1.27",), "the user of an exec is misread"),
    Advisory(
        "CVE-2026-47766", "crun", ("1.28",),
        "links made on the host, by an image whose /dev is a link",
    ),
    Advisory("CVE-2022-23471", "containerd", ("1.5.16", "1.6.12"), "memory used up by execs"),
    Advisory("CVE-2023-25173", "containerd", ("1.5.18", "1.6.18"), "supplementary groups"),
    Advisory(
        "CVE-2024-25621", "containerd", ("1.7.29", "2.0.7", "2.1.5", "2.2.0"),
        "directories that others may pass through",
    ),
    Advisory("CVE-2024-40635", "containerd", ("1.6.38", "1.7.27", "2.0.4"), "a user that is root"),
    Advisory(
        "CVE-2025-47290", "containerd", ("2.1.1",), "files of the host, by a race while unpacking",
        severe=True, since="2.1.0",
    ),
    Advisory(
        "CVE-2025-64329", "containerd", ("1.7.29", "2.0.7", "2.1.5", "2.2.0"),
        "memory used up by attaching",
    ),
    Advisory(
        "CVE-2026-46680", "containerd", ("1.7.32", "2.0.9", "2.2.4", "2.3.1"),
        "a user that is root, past runAsNonRoot",
    ),
    Advisory(
        "CVE-2026-50195", "containerd", _JUNE, "another image under a name, by a checkpoint",
        since="2.1.0",
    ),
    Advisory(
        "CVE-2026-53488", "containerd", ("1.7.33", "2.0.10", *_JUNE),
        "a command run on the host, by a label of an image", severe=True,
    ),
    Advisory(
        "CVE-2026-53492", "containerd", _JUNE,
        "devices that nobody granted, by CDI annotations in a checkpoint", severe=True,
        since="2.1.0",
    ),
    Advisory(
        "CVE-2026-53495", "containerd", ("2.2.8", "2.3.5"), "memory used up by ExecSync",
        since="2.2.0",
    ),
    Advisory(
        "CVE-2024-0132", "nvidia-container-toolkit", ("1.16.2",),
        "the host's file system, by links in an image", severe=True,
    ),
    Advisory("CVE-2024-0133", "nvidia-container-toolkit", ("1.16.2",), "files made on the host"),
    Advisory("CVE-2024-0134", "nvidia-container-toolkit", ("1.17.1",), "files made on the host"),
    Advisory(
        "CVE-2024-0135", "nvidia-container-toolkit", ("1.17.3",),
        "a program of the host changed", severe=True,
    ),
    Advisory("CVE-2024-0136", "nvidia-container-toolkit", ("1.17.3",), "devices of the host"),
    Advisory("CVE-2024-0137", "nvidia-container-toolkit", ("1.17.3",), "the host's network"),
    Advisory(
        "CVE-2025-23359", "nvidia-container-toolkit", ("1.17.4",),
        "the host's file system, by links in an image", severe=True,
    ),
    Advisory(
        "CVE-2025-23266", "nvidia-container-toolkit", ("1.17.8",),
        "root on the host, by LD_PRELOAD of an image", severe=True,
    ),
    Advisory(
        "CVE-2025-23267", "nvidia-container-toolkit", ("1.17.8",),
        "files of the host, by links in an image", severe=True,
    ),
    Advisory(
        "CVE-2026-24260", "nvidia-container-toolkit", ("1.19.1",),
        "root on the host, by a race in hooks", severe=True,
    ),
)  # fmt: skip


def parse_version(text: str) -> Version | None:
    """The version in a text, as semantic versioning orders it.

    Args:
        text: "1.4.0-rc.3", or a distribution's "1.1.5+ds1".

    Returns:
        The version; None if there is none in it.
    """
    found = _VERSION.search(text)
    if found is None:
        return None
    major, minor, patch, stage, number = found.groups()
    return int(major), int(minor), int(patch or 0), _STAGES[stage], int(number or 0)


def affecting(program: str, version: str) -> list[Advisory]:
    """What a version of a program is vulnerable to, by its number alone.

    Args:
        program: "runc", "crun", "containerd" or "nvidia-container-toolkit".
        version: what it says of itself.
    """
    number = parse_version(version)
    if number is None:
        return []
    return [a for a in ADVISORIES if a.program == program and _affects(a, number)]


def _affects(advisory: Advisory, version: Version) -> bool:
    if advisory.since and version < _known(advisory.since):
        return False
    fixes = [_known(fixed) for fixed in advisory.fixed]
    return version < max(fixes) and not _has_one(version, fixes)


def _has_one(version: Version, fixes: Iterable[Version]) -> bool:
    return any(version[:2] == fixed[:2] and version >= fixed for fixed in fixes)


def _known(text: str) -> Version:
    version = parse_version(text)
    if version is None:
        raise ValueError(f"{text!r} of the table is no version")
    return version
