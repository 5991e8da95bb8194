"""Known vulnerabilities of container runtimes and engines, as data.

Rules
- ``fixed`` has the first fixed version of each branch. A version is affected if it is at least
  ``since``, older than the newest fixed version, and not at or above the fixed version of its own
  branch.
- Distributions fix vulnerabilities without changing the program's version. CVEs that a package's
  changelog names are not reported; the others are reported with a note that the distribution may
  have fixed them.
- Only vulnerabilities that concern containers on a node are listed, and only those published by
  the program's project or vendor.

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
    """A vulnerability of a program."""

    cve: str
    program: str
    fixed: tuple[str, ...]  # the first fixed version of each branch
    what: str  # the attack, in a few words
    severe: bool = False  # whether a container can escape, or reach another one
    since: str = ""  # the first affected version; "" for all


OLDEST: Final = {"runc": "1.1.0", "crun": "1.8.0", "containerd": "1.6.0"}
"""The oldest versions that this project supports."""

_TRIO: Final = ("1.2.8", "1.3.3", "1.4.0-rc.3")
_JUNE: Final = ("2.1.9", "2.2.5", "2.3.2")

ADVISORIES: Final = (
    Advisory("CVE-2022-29162", "runc", ("1.1.2",), "execs get inheritable capabilities"),
    Advisory("CVE-2023-27561", "runc", ("1.1.5",), "masks of /proc bypassed by a link at /proc"),
    Advisory(
        "CVE-2023-28642", "runc", ("1.1.5",),
        "AppArmor and SELinux bypassed by a link at /proc",
    ),
    Advisory(
        "CVE-2024-21626", "runc", ("1.1.12", "1.2.0-rc.1"),
        "access to the host's file system through a leaked descriptor", severe=True,
    ),
    Advisory("CVE-2024-45310", "runc", ("1.1.14", "1.2.0-rc.3"), "empty files created on the host"),
    Advisory("CVE-2025-31133", "runc", _TRIO, "masked paths bypassed by a link at /dev/null",
             severe=True),
    Advisory("CVE-2025-52565", "runc", _TRIO, "escape through the mount of /dev/console",
             severe=True),
    Advisory("CVE-2025-52881", "runc", _TRIO, "writes to procfs redirected", severe=True),
    Advisory(
        "CVE-2026-41579", "runc", ("1.3.6", "1.4.3", "1.5.0-rc.3"),
        "links created on the host by an image whose /dev is a link",
    ),
    Advisory("CVE-2022-27650", "crun", ("1.4.4",), "execs get inheritable capabilities"),
    Advisory("CVE-2025-24965", "crun", ("1.20",), "files written on the host by the krun handler"),
    Advisory("CVE-2026-30892", "crun", ("1.27",), "the user of an exec is parsed wrongly"),
    Advisory(
        "CVE-2026-47766", "crun", ("1.28",),
        "links created on the host by an image whose /dev is a link",
    ),
    Advisory("CVE-2022-23471", "containerd", ("1.5.16", "1.6.12"), "memory exhausted by execs"),
    Advisory(
        "CVE-2023-25173", "containerd", ("1.5.18", "1.6.18"),
        "supplementary groups set wrongly",
    ),
    Advisory(
        "CVE-2024-25621", "containerd", ("1.7.29", "2.0.7", "2.1.5", "2.2.0"),
        "directories accessible to all users",
    ),
    Advisory(
        "CVE-2024-40635", "containerd", ("1.6.38", "1.7.27", "2.0.4"),
        "a large user id becomes root",
    ),
    Advisory(
        "CVE-2025-47290", "containerd", ("2.1.1",),
        "files written on the host by a race while unpacking",
        severe=True, since="2.1.0",
    ),
    Advisory(
        "CVE-2025-64329", "containerd", ("1.7.29", "2.0.7", "2.1.5", "2.2.0"),
        "memory exhausted by attaching",
    ),
    Advisory(
        "CVE-2026-46680", "containerd", ("1.7.32", "2.0.9", "2.2.4", "2.3.1"),
        "root despite runAsNonRoot",
    ),
    Advisory(
        "CVE-2026-50195", "containerd", _JUNE, "an image replaced under its name by a checkpoint",
        since="2.1.0",
    ),
    Advisory(
        "CVE-2026-53488", "containerd", ("1.7.33", "2.0.10", *_JUNE),
        "a command run on the host by an image's label", severe=True,
    ),
    Advisory(
        "CVE-2026-53492", "containerd", _JUNE,
        "devices without a grant, by CDI annotations in a checkpoint", severe=True,
        since="2.1.0",
    ),
    Advisory(
        "CVE-2026-53495", "containerd", ("2.2.8", "2.3.5"), "memory exhausted by ExecSync",
        since="2.2.0",
    ),
    Advisory(
        "CVE-2024-0132", "nvidia-container-toolkit", ("1.16.2",),
        "access to the host's file system by links in an image", severe=True,
    ),
    Advisory("CVE-2024-0133", "nvidia-container-toolkit", ("1.16.2",), "files created on the host"),
    Advisory("CVE-2024-0134", "nvidia-container-toolkit", ("1.17.1",), "files created on the host"),
    Advisory(
        "CVE-2024-0135", "nvidia-container-toolkit", ("1.17.3",),
        "a program on the host changed", severe=True,
    ),
    Advisory(
        "CVE-2024-0136", "nvidia-container-toolkit", ("1.17.3",),
        "access to the host's devices",
    ),
    Advisory(
        "CVE-2024-0137", "nvidia-container-toolkit", ("1.17.3",),
        "access to the host's network",
    ),
    Advisory(
        "CVE-2025-23359", "nvidia-container-toolkit", ("1.17.4",),
        "access to the host's file system by links in an image", severe=True,
    ),
    Advisory(
        "CVE-2025-23266", "nvidia-container-toolkit", ("1.17.8",),
        "root on the host by an image's LD_PRELOAD", severe=True,
    ),
    Advisory(
        "CVE-2025-23267", "nvidia-container-toolkit", ("1.17.8",),
        "files changed on the host by links in an image", severe=True,
    ),
    Advisory(
        "CVE-2026-24260", "nvidia-container-toolkit", ("1.19.1",),
        "root on the host by a race in hooks", severe=True,
    ),
)  # fmt: skip


def parse_version(text: str) -> Version | None:
    """Parse a version so that versions compare as in semantic versioning.

    Args:
        text: "1.4.0-rc.3", or a distribution's "1.1.5+ds1".

    Returns:
        The version; None if the text has none.
    """
    found = _VERSION.search(text)
    if found is None:
        return None
    major, minor, patch, stage, number = found.groups()
    return int(major), int(minor), int(patch or 0), _STAGES[stage], int(number or 0)


def affecting(program: str, version: str) -> list[Advisory]:
    """Return the advisories that affect a version, judged by the version number alone.

    Args:
        program: "runc", "crun", "containerd" or "nvidia-container-toolkit".
        version: the version that the program prints.
    """
    number = parse_version(version)
    if number is None:
        return []
    return [a for a in ADVISORIES if a.program == program and _affects(a, number)]


def _affects(advisory: Advisory, version: Version) -> bool:
    if advisory.since and version < _known(advisory.since):
        return False
    fixes = [_known(fixed) for fixed in advisory.fixed]
    return version < max(fixes) and not _is_fixed_in_branch(version, fixes)


def _is_fixed_in_branch(version: Version, fixes: Iterable[Version]) -> bool:
    return any(version[:2] == fixed[:2] and version >= fixed for fixed in fixes)


def _known(text: str) -> Version:
    version = parse_version(text)
    if version is None:
        raise ValueError(f"{text!r} in the table is not a version")
    return version
