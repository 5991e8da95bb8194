"""What can go wrong while something is taken out of service, or returned to it: E264x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class DrainError(IntegrationError, code="NVSHIM-E2640"):
    """Base of what :mod:`integration.drain` raises."""


class TargetUnknown(DrainError, code="NVSHIM-E2641", status=Status.NOT_FOUND):
    """A name is that of no GPU or MIG device of this node, or of several."""


class MarkUnwritten(DrainError, code="NVSHIM-E2642", status=Status.PERMISSION_DENIED):
    """That something is out of service cannot be written down, or not be taken back."""


class NotDrained(DrainError, code="NVSHIM-E2643", status=Status.NOT_FOUND):
    """What is to be returned to service is in service."""


class StillHeld(DrainError, code="NVSHIM-E2644", status=Status.FAILED_PRECONDITION):
    """A GPU is to be reset, and somebody still holds it. It stays out of service."""


class ResetRunning(DrainError, code="NVSHIM-E2645", status=Status.ABORTED):
    """Another reset is under way on this node."""


class ResetFailed(DrainError, code="NVSHIM-E2646", status=Status.FAILED_PRECONDITION):
    """nvidia-smi did not reset the GPU, or is not there. The GPU stays out of service."""

    remedy = "do what nvidia-smi says, and run it again; some GPUs are reset by a reboot alone"


class ResetUnproven(DrainError, code="NVSHIM-E2647", status=Status.FAILED_PRECONDITION):
    """The GPU was reset and does not answer as it should. It stays out of service."""
