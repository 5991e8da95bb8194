"""Errors of looking at a node: E251x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class InspectionError(IntegrationError, code="NVSHIM-E2510"):
    """Base of the errors of commands that inspect a node, or our configuration."""


class ContainerUnknown(InspectionError, code="NVSHIM-E2511", status=Status.NOT_FOUND):
    """The given name matches no running container."""


class StateUnreadable(InspectionError, code="NVSHIM-E2513", status=Status.PERMISSION_DENIED):
    """The caller may not read containerd's state directory, or a process."""


# fmt: off
ContainerAmbiguous = InspectionError.row(
    "NVSHIM-E2512 container-ambiguous", Status.INVALID_ARGUMENT,
    "The given name matches several running containers.")
