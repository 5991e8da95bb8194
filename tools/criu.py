"""Find a CRIU that works with the running kernel: the installed one, or a later release's.

CRIU must support the kernel that it runs on. It remaps the memory of processes, and a much newer
kernel has another layout of the parts that CRIU searches. Debian 12's CRIU refuses Linux 6.18
(``vdso: Unexpected rt vDSO area bounds``); Debian 13's works there.

Source: criu(8), check.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from typing import Final

from integration.simulated.errors import PackagesError
from tools.errors import CriuUnusable, ProgramNotAdapted
from tools.parts import SYSTEM_PATH, program_of_release

RELEASES: Final = ("trixie", "sid")

_CHECK_TIMEOUT: Final = 30.0


def find_criu(*, say: Callable[[str], None] | None = None) -> str:
    """Return the path of a CRIU whose own check succeeds here.

    Args:
        say: called with one line about each download.

    Raises:
        CriuUnusable: there is none; the message quotes the error of each.
    """
    refused = []
    installed = shutil.which("criu", path=SYSTEM_PATH)
    if installed is not None:
        why = complaint(installed)
        if not why:
            return installed
        refused.append(f"the installed one: {why}")
    for release in RELEASES:
        try:
            program = program_of_release("criu", release, say=say)
        except (PackagesError, ProgramNotAdapted) as error:
            why = error.found
        else:
            why = complaint(program)
            if not why:
                return program
        refused.append(f"that of {release}: {why}")
    raise CriuUnusable(
        "a CRIU for this kernel", found="; ".join(refused), do="run `criu check` as root"
    )


def complaint(program: str) -> str:
    """Return why a CRIU does not work on this machine; empty if it works."""
    try:
        done = subprocess.run(
            [program, "check"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CHECK_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"criu check was still running after {_CHECK_TIMEOUT:g} s"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if "Error" in line]
    # The last lines have the reason; the lines of failed children do not.
    said = [line for line in lines if "exited, status" not in line]
    return (said or lines or [f"exit status {done.returncode}"])[0]
