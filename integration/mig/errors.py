"""Errors of MIG layouts: E268x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class MigError(IntegrationError, code="NVSHIM-E2680"):
    """Base of the errors of :mod:`integration.mig`."""


class LayoutImpossible(MigError, code="NVSHIM-E2683", status=Status.FAILED_PRECONDITION):
    """A GPU cannot have the MIG devices of the layout: it lacks a profile, or the room for all."""


class LayoutFailed(
    MigError,
    code="NVSHIM-E2685",
    status=Status.FAILED_PRECONDITION,
    remedy="do what it says, and apply the layout again",
):
    """A step of applying a MIG layout failed. The GPUs are as they were before."""


# fmt: off
MigConfigInvalid = MigError.row("NVSHIM-E2681 mig-config-invalid", Status.INVALID_ARGUMENT,
    "A file of MIG layouts is missing, or not a configuration of mig-parted's version v1.")
LayoutUnknown = MigError.row("NVSHIM-E2682 layout-unknown", Status.NOT_FOUND,
    "The file has no MIG layout of this name, or several layouts and none was named.")
LayoutHeld = MigError.row("NVSHIM-E2684 layout-held", Status.FAILED_PRECONDITION,
    "Containers, processes or claims hold what the layout removes. Nothing was changed.")
LayoutNotUndone = MigError.row("NVSHIM-E2686 layout-not-undone", Status.FAILED_PRECONDITION,
    "A MIG layout was applied in part, and undoing it failed. The GPUs that it failed for stay out "
    "of service; the next ``nvshim mig apply`` undoes it first.",
    remedy="do what it says, and apply a layout again")
LayoutDiffers = MigError.row("NVSHIM-E2687 layout-differs", Status.FAILED_PRECONDITION,
    "The GPUs of this node are not as the MIG layout says.",
    remedy="see `nvshim mig diff`, and apply the layout")
MigRecordUnusable = MigError.row("NVSHIM-E2689 mig-record-unusable", Status.DATA_LOSS,
    "A MIG layout was applied in part, and the record of what the GPUs had before cannot be read. "
    "The GPUs stay out of service, and no layout is applied.",
    remedy="make the file readable again; or return the GPUs to service as they are, with "
           "`nvshim undrain`, and apply a layout")
MigUnreadable = MigError.row("NVSHIM-E2688 mig-unreadable", Status.UNAVAILABLE,
    "NVML does not say how the node's GPUs are partitioned.",
    remedy="see that nvidia-smi works on the node")
