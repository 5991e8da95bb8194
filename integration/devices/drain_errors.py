"""Errors of draining and resetting devices: E264x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class DrainError(IntegrationError, code="NVSHIM-E2640"):
    """Base of the errors of :mod:`integration.drain`."""


class StillHeld(DrainError, code="NVSHIM-E2644", status=Status.FAILED_PRECONDITION):
    """A process still holds the GPU to reset. The GPU stays out of service."""


class ResetFailed(
    DrainError,
    code="NVSHIM-E2646",
    status=Status.FAILED_PRECONDITION,
    remedy="do what nvidia-smi says, and run it again; some GPUs can be reset only by a reboot",
):
    """nvidia-smi is missing, or did not reset the GPU. The GPU stays out of service."""


class ResetUnproven(DrainError, code="NVSHIM-E2647", status=Status.FAILED_PRECONDITION):
    """The GPU was reset and does not answer correctly. It stays out of service."""


# fmt: off
TargetUnknown = DrainError.row("NVSHIM-E2641 target-unknown", Status.NOT_FOUND,
    "A name matches no GPU or MIG device of this node, or several.")
MarkUnwritten = DrainError.row("NVSHIM-E2642 mark-unwritten", Status.PERMISSION_DENIED,
    "The mark of a device out of service cannot be written or removed.")
NotDrained = DrainError.row("NVSHIM-E2643 not-drained", Status.NOT_FOUND,
    "The device to return to service is in service.")
ResetRunning = DrainError.row("NVSHIM-E2645 reset-running", Status.ABORTED,
    "Another reset is running on this node.")
