"""Check whether an agent runs on this node, by its lock and its status file.

A kubelet's probe runs this every few seconds, so it imports nothing of the agent.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final

from hooks.config import Config
from integration.files import read_file
from integration.json_documents import parse_json
from shim.causes.agent import agent_of, agent_runs, is_locked

__all__ = ["PODS", "is_ready", "late_after", "pod_path", "status_path"]

PODS: Final = "pods"
_STATUS: Final = "node.json"

# The status is stale after this many intervals between two checks.
_LATE: Final = 3


def pod_path(config: Config, uid: str) -> str:
    """Return the file that a pod's agent locks."""
    return os.path.join(config.state, PODS, uid)


def late_after(config: Config, poll: float) -> float:
    """Return the age in seconds from which the status file is stale.

    Args:
        poll: seconds between two checks when no event arrives.
    """
    return _LATE * poll + config.nvml_timeout


def status_path(config: Config) -> str:
    """Return the path of the status file."""
    return os.path.join(config.state, _STATUS)


def is_ready(config: Config, pod: str = "") -> bool:
    """Return whether an agent runs on this node and has looked at it recently.

    Args:
        pod: the UID of the pod whose agent must be running or waiting for its turn; "" for any.
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
            return False  # the file is the previous agent's
    except (ValueError, KeyError, TypeError):
        return False
    # A time in the future comes from a clock that was set back.
    return abs(age) < late_after(config, poll)
