"""What can go wrong while something is taken out of service, or returned to it.

Leaves of the tree in :mod:`api.errors`, beside those in :mod:`integration.errors`::

    IntegrationError
    └── DrainError               E2640
        ├── TargetUnknown        E2641    ├── ResetRunning       E2645
        ├── MarkUnwritten        E2642    ├── ResetFailed        E2646
        ├── NotDrained           E2643    └── ResetUnproven      E2647
        └── StillHeld            E2644
"""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class DrainError(IntegrationError):
    """Base of what :mod:`integration.drain` raises."""

    code = "NVSHIM-E2640"


class TargetUnknown(DrainError):
    """A name is that of no GPU or MIG device of this node, or of several."""

    code = "NVSHIM-E2641"
    status = Status.NOT_FOUND


class MarkUnwritten(DrainError):
    """That something is out of service cannot be written down, or not be taken back."""

    code = "NVSHIM-E2642"
    status = Status.PERMISSION_DENIED


class NotDrained(DrainError):
    """What is to be returned to service is in service."""

    code = "NVSHIM-E2643"
    status = Status.NOT_FOUND


class StillHeld(DrainError):
    """A GPU is to be reset, and somebody still holds it. It stays out of service."""

    code = "NVSHIM-E2644"
    status = Status.FAILED_PRECONDITION


class ResetRunning(DrainError):
    """Another reset is under way on this node."""

    code = "NVSHIM-E2645"
    status = Status.ABORTED


class ResetFailed(DrainError):
    """nvidia-smi did not reset the GPU, or is not there. The GPU stays out of service."""

    code = "NVSHIM-E2646"
    status = Status.FAILED_PRECONDITION


class ResetUnproven(DrainError):
    """The GPU was reset and does not answer as it should. It stays out of service."""

    code = "NVSHIM-E2647"
    status = Status.FAILED_PRECONDITION
