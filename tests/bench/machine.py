"""A description of the machine: figures mean nothing without it."""

from __future__ import annotations

import os
import platform
import subprocess
import time

from tests.harness.dist import built


def describe(rounds: int, load: float) -> dict[str, str]:
    """Describe the machine, its programs, the day, and the number of rounds.

    Args:
        load: the machine's load before the first measurement.
    """
    return {
        "measured on": time.strftime("%Y-%m-%d"),
        "processors": str(os.cpu_count()),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "Linux": platform.release(),
        "containerd": _version("containerd", "--version"),
        "runc": _version("runc", "--version"),
        "crun": _version("crun", "--version"),
        "Python": built().python,
        "rounds": str(rounds),
        "load before": f"{load:.1f}",
    }


def _version(*argv: str) -> str:
    """Return the first word of a program's first line that looks like a version."""
    text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    words = text.splitlines()[0].split()
    return next((word for word in words if word[:1].isdigit()), words[-1])
