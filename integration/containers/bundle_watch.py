"""The directories to watch for containers that come, go, start or exit.

Two kinds of change matter: namespaces and bundles that appear or disappear, and changes of two
files of a bundle (the record of the injection, and the pid of init). A bundle's other files change
with each exec.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

from integration.containers.bundles import TASKS
from integration.files import directories
from integration.watcher import Interest
from shim.bundle import INIT_PID, RECORD

_ENTRIES: Final = Interest(content=False)
_RECORD_AND_PID: Final = Interest(frozenset({RECORD, INIT_PID}), content=False)


def watched_directories(states: Iterable[str]) -> dict[str, Interest]:
    """Return the directories below containerd's state directories, and what matters in each.

    Args:
        states: the state directories, which may be missing.
    """
    found = {}
    for state in states:
        tasks = os.path.join(state, TASKS)
        found[tasks] = _ENTRIES
        for namespace in directories(tasks):
            found[namespace] = _ENTRIES
            found |= dict.fromkeys(directories(namespace), _RECORD_AND_PID)
    return found
