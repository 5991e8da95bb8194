"""Whether a node agent runs, which knows more about faults than a shim."""

from __future__ import annotations

import fcntl
import os
from typing import Final

__all__ = ["LOCK", "agent_of", "agent_runs", "is_locked"]

LOCK: Final = "node.lock"
"""The file in our state directory that a running agent holds locked."""

_LONGEST_PID: Final = 32


def is_locked(path: str) -> bool:
    """Whether a process holds a lock on a file (flock(2)).

    Args:
        path: the file; no link is followed. An unreadable file counts as not locked.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def agent_runs(state: str) -> bool:
    """Whether an agent has this node, in any state.

    Args:
        state: the directory ``state`` of the configuration.
    """
    return is_locked(os.path.join(state, LOCK))


def agent_of(state: str) -> int:
    """Return the running agent's pid, as it sees it itself; 0 if there is none, or if unknown.

    Args:
        state: the directory ``state`` of the configuration.
    """
    if not agent_runs(state):
        return 0
    try:
        with open(os.path.join(state, LOCK), "rb") as file:
            text = file.read(_LONGEST_PID).strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0
