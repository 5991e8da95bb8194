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
    """A child that talks with NVML hangs, crashed, or says that NVML failed."""
