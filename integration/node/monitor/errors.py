"""What can go wrong while GPUs are watched.

Leaves of the tree in :mod:`api.errors`, below
:class:`~integration.node.errors.NodeAgentError`::

    MonitorError
    ├── ChildFailed         E2745  the child that talks with NVML
    └── KernelLogUnusable   E2746  the kernel's log cannot be read
"""

from __future__ import annotations

from api.errors import Status
from integration.node.errors import NodeAgentError


class MonitorError(NodeAgentError):
    """Base of what can go wrong while GPUs are watched."""


class ChildFailed(MonitorError):
    """A child that talks with NVML hangs, crashed, makes no sense, or says that NVML failed."""

    code = "NVSHIM-E2745"
    status = Status.UNAVAILABLE
    remedy = "see that nvidia-smi works on the node"


class KernelLogUnusable(MonitorError):
    """The kernel's log cannot be read, so that an Xid is not attributed to its process."""

    code = "NVSHIM-E2746"
    status = Status.FAILED_PRECONDITION
