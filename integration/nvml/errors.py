"""Errors of the children that talk to NVML."""

from __future__ import annotations

from api.errors import Status
from integration.agent_errors import NodeAgentError


class ChildFailed(
    NodeAgentError,
    code="NVSHIM-E2745",
    status=Status.UNAVAILABLE,
    remedy="see that nvidia-smi works on the node",
):
    """A child process that talks to NVML hangs, has crashed, or reports that NVML failed."""
