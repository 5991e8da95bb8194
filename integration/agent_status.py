"""Whether an agent keeps this node: asked of its lock and its status file, without the agent.

A kubelet asks it every few seconds, so this imports nothing of the agent's.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

from integration.files import read_file
from integration.json_documents import parse_json
from shim.causes.agent import agent_of, agent_runs, is_locked

if TYPE_CHECKING:
    from hooks.config import Config

__all__ = ["PODS", "is_ready", "late_after", "pod_path", "status_path"]

PODS: Final = "pods"
_STATUS: Final = "node.json"

# A look that has not come for so many times the time between two is not going to come.
_LATE: Final = 3


def pod_path(config: Config, uid: str) -> str:
    """The file that the agent of a pod holds locked."""
    return os.path.join(config.state, PODS, uid)


def late_after(config: Config, poll: float) -> float:
    """Seconds since the last look after which no other is going to come.

    Args:
        poll: between two looks that nothing gave a reason for.
    """
    return _LATE * poll + config.nvml_timeout


def status_path(config: Config) -> str:
    """Where the agent says how it is."""
    return os.path.join(config.state, _STATUS)


def is_ready(config: Config, pod: str = "") -> bool:
    """Whether an agent keeps this node, and has looked at it not long ago.

    Args:
        pod: the UID of one whose agent has to be that one, or to wait for its turn and to serve
            beside it; "" for any.
    """
    path = status_path(config)
    if pod and not is_locked(pod_path(config, pod)):
        return False
    try:
        content = read_file(path)
        age = time.time() - os.stat(path).st_mtime
    except OSError:
        return False
    if not agent_runs(config.state):
        return False
    try:
        status: Any = parse_json(content or b"{}")
        poll = float(status["poll"])
        if (agent := agent_of(config.state)) and agent != status["pid"]:
            return False  # the one before has looked; this one has not yet
    except (ValueError, KeyError, TypeError):
        return False
    # One of the future is of a clock that was set back since.
    return abs(age) < late_after(config, poll)
