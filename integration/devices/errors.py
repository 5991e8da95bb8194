"""Errors of making device nodes and links: E253x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class DevicesError(IntegrationError):
    """Base of the errors of making device nodes."""


class DevicesNotMade(DevicesError, code="NVSHIM-E2536", status=Status.FAILED_PRECONDITION):
    """A module, node or link could not be loaded or made; the others were.

    Raised by :func:`integration.devices.creating.refuse_failures`.
    """


class ModulesNotLoaded(DevicesError, code="NVSHIM-E2537", status=Status.FAILED_PRECONDITION):
    """modprobe did not load the driver's own module.

    Raised by :func:`integration.devices.creating.create`.
    """
