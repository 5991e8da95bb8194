"""What of containerd's state tells that containers come, go, are created or end.

Namespaces and bundles that are made and removed do, and two files of a bundle: what was injected,
and the pid of init. Other files of a bundle change with each exec, and wake nobody.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from integration.inspection.bundles import TASKS
from integration.node.watcher import Interest
from shim import bundle as bundle_files

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["interests"]

_MADE_OR_REMOVED: Final = Interest(content=False)
_OF_A_BUNDLE: Final = Interest(
    frozenset({bundle_files.RECORD, bundle_files.INIT_PID}), content=False
)


def interests(states: Iterable[str]) -> dict[str, Interest]:
    """The directories that matter, and what does in each.

    Args:
        states: containerd's state directories, whether they are there or not.
    """
    found = {}
    for state in states:
        tasks = os.path.join(state, TASKS)
        found[tasks] = _MADE_OR_REMOVED
        for namespace in _directories(tasks):
            found[namespace] = _MADE_OR_REMOVED
            found |= dict.fromkeys(_directories(namespace), _OF_A_BUNDLE)
    return found


def _directories(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
