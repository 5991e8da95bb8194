"""Whether a node agent runs, which knows more of faults than the shim can."""

from __future__ import annotations

import fcntl
import os
from typing import Final

__all__ = ["LOCK", "agent_of", "agent_runs", "is_locked"]

LOCK: Final = "node.lock"
"""What an agent holds locked in the directory of our state, as long as it lives."""

_LONGEST_PID: Final = 32


def is_locked(path: str) -> bool:
    """Whether a process holds a lock on a file (flock(2)).

    Args:
        path: no link is followed. A file that cannot be opened counts as not held.
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
    """Whether an agent has this node, whatever state it is in.

    Args:
        state: the directory ``state`` of the configuration.
    """
    return is_locked(os.path.join(state, LOCK))


def agent_of(state: str) -> int:
    """Return the pid of the running agent, as it sees it itself; 0 if there is none, or unknown.

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
