"""Find the programs of a private containerd.

They are looked up on the path of system services, not on the developer's.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Final, Self

from integration.simulated.errors import ContainerdNotInstalled

SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

INSTALLED: Final = "installed"

OF_CONTAINERD: Final = ("containerd", "ctr", "containerd-shim-runc-v2")
LOW_LEVEL: Final = ("runc", "crun")


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of a containerd, as absolute paths."""

    name: str  # "installed", or their release
    containerd: str
    ctr: str
    shim: str  # containerd-shim-runc-v2
    runc: str  # the default low-level runtime
    crun: str  # the alternative

    @classmethod
    def installed(cls) -> Self:
        """Return the installed programs.

        Raises:
            ContainerdNotInstalled: a program is missing.
        """
        return cls(INSTALLED, *(_find(program) for program in (*OF_CONTAINERD, *LOW_LEVEL)))

    @property
    def path(self) -> str:
        """A search path with these programs first."""
        system = SYSTEM_PATH.split(":")
        own = dict.fromkeys(os.path.dirname(program) for program in (self.runc, self.containerd))
        return ":".join((*(directory for directory in own if directory not in system), *system))

    @property
    def version(self) -> tuple[int, int]:
        """The version of containerd: (1, 7)."""
        return _version_of(self.containerd)


@functools.cache
def _version_of(containerd: str) -> tuple[int, int]:
    done = subprocess.run([containerd, "--version"], capture_output=True, text=True, check=True)
    # containerd github.com/containerd/containerd 1.7.24~ds1 1.7.24~ds1-6+deb13u1
    match = re.search(r" v?(\d+)\.(\d+)\.", done.stdout)
    if match is None:
        raise ContainerdNotInstalled(
            f"to read the version of {containerd}", found=done.stdout.strip() or "no output"
        )
    return int(match[1]), int(match[2])


def _find(program: str) -> str:
    found = shutil.which(program, path=SYSTEM_PATH)
    if found is None:
        raise ContainerdNotInstalled(
            f"to find the program {program}",
            found=f"none in {SYSTEM_PATH}",
            do="install the packages containerd, runc and crun",
        )
    return found
