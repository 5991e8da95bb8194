"""Errors of looking at a node: E251x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class InspectionError(IntegrationError, code="NVSHIM-E2510"):
    """Base of what can go wrong while somebody looks at a node, or at our configuration."""


class ContainerUnknown(InspectionError, code="NVSHIM-E2511", status=Status.NOT_FOUND):
    """No running container is meant by what was given."""


class StateUnreadable(InspectionError, code="NVSHIM-E2513", status=Status.PERMISSION_DENIED):
    """containerd's state directory, or a process, may not be looked into."""


# fmt: off
ContainerAmbiguous = InspectionError.row(
    "NVSHIM-E2512 container-ambiguous", Status.INVALID_ARGUMENT,
    "More than one running container can be meant.")
