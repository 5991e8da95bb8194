"""What can go wrong with MPS.

Leaves of the tree in :mod:`integration.node.errors`, below ``NodeAgentError``::

    MpsError                E27xx
    ├── MpsNotReady         E2735  the control daemon cannot serve a container now
    ├── MpsImpossible       E2736  these devices cannot be shared so
    ├── MpsProgramMissing   E2737  the driver has no MPS control daemon
    ├── MpsDaemonFailed     E2738  it ended, or does not answer
    ├── MpsStateUnusable    E2739  its directories or shared memory cannot be made
    └── ComputeModeFailed   E2740  a GPU's compute mode could not be set
"""

from __future__ import annotations

from api.errors import Status
from integration.node.errors import NodeAgentError


class MpsError(NodeAgentError):
    """Base of what can go wrong with MPS."""


class MpsNotReady(MpsError):
    """A container would wait for a daemon that is not there, or would go past it.

    Raised by :func:`integration.node.mps.containers.refuse_unready`.
    """

    code = "NVSHIM-E2735"
    status = Status.UNAVAILABLE


class MpsImpossible(MpsError):
    """The devices cannot be shared by MPS. Raised by :func:`integration.node.mps.plan.plan_of`."""

    code = "NVSHIM-E2736"
    status = Status.FAILED_PRECONDITION


class MpsProgramMissing(MpsError):
    """The driver's files have no control daemon, or no server."""

    code = "NVSHIM-E2737"
    status = Status.FAILED_PRECONDITION


class MpsDaemonFailed(MpsError):
    """The control daemon could not be started, has ended, or does not answer as it should."""

    code = "NVSHIM-E2738"
    status = Status.UNAVAILABLE


class MpsStateUnusable(MpsError):
    """What daemons and containers share cannot be made below ``mpsRoot``."""

    code = "NVSHIM-E2739"
    status = Status.FAILED_PRECONDITION


class ComputeModeFailed(MpsError):
    """NVML did not set the compute mode of a GPU."""

    code = "NVSHIM-E2740"
    status = Status.UNAVAILABLE
