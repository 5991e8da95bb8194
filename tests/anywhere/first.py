"""``python -m tests.anywhere.first -- COMMAND…``: the first process of a pid namespace.

It runs a command, reaps orphans until the command exits, and exits with its status.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def be_first(command: list[str], environment: Mapping[str, str]) -> int:
    """Run a command, and reap orphans until it exits.

    Returns:
        Its exit status; 128 plus the signal if a signal killed it.
    """
    child = os.posix_spawnp(command[0], command, environment)
    while True:
        pid, status = os.wait()
        if pid == child:
            return exit_code(status)


def exit_code(status: int) -> int:
    """Convert a status of wait(2) to the exit status that a shell shows."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    _, _, *words = sys.argv  # the words after --
    sys.exit(be_first(words, os.environ))
