"""Errors of draining and resetting devices: E264x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class DrainError(IntegrationError, code="NVSHIM-E2640"):
    """Base of the errors of :mod:`integration.drain`."""


class TargetUnknown(DrainError, code="NVSHIM-E2641", status=Status.NOT_FOUND):
    """A name matches no GPU or MIG device of this node, or several."""


class MarkUnwritten(DrainError, code="NVSHIM-E2642", status=Status.PERMISSION_DENIED):
    """The mark of a device out of service cannot be written, or not removed."""


class NotDrained(DrainError, code="NVSHIM-E2643", status=Status.NOT_FOUND):
    """The device to return to service is in service."""


class StillHeld(DrainError, code="NVSHIM-E2644", status=Status.FAILED_PRECONDITION):
    """A process still holds the GPU to reset. The GPU stays out of service."""


class ResetRunning(DrainError, code="NVSHIM-E2645", status=Status.ABORTED):
    """Another reset is under way on this node."""


class ResetFailed(DrainError, code="NVSHIM-E2646", status=Status.FAILED_PRECONDITION):
    """nvidia-smi is missing, or did not reset the GPU. The GPU stays out of service."""

    remedy = "do what nvidia-smi says, and run it again; some GPUs can be reset only by a reboot"


class ResetUnproven(DrainError, code="NVSHIM-E2647", status=Status.FAILED_PRECONDITION):
    """The GPU was reset and does not answer correctly. It stays out of service."""
