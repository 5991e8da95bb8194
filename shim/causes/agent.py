"""Whether a node agent runs, which tells of faults what the shim cannot know."""

from __future__ import annotations

import fcntl
import os
from typing import Final

__all__ = ["LOCK", "agent_runs"]

LOCK: Final = "node.lock"
"""What an agent holds locked in the directory of our state, as long as it lives."""


def agent_runs(state: str) -> bool:
    """Whether an agent has this node, whatever it does.

    Args:
        state: the directory ``state`` of the configuration.
    """
    try:
        fd = os.open(os.path.join(state, LOCK), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
