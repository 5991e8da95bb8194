"""Errors of the commands for CDI spec files: E253x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class CdiCommandError(IntegrationError):
    """Base of the errors of :mod:`integration.cdi`."""


class CdiSpecUnwritten(CdiCommandError, code="NVSHIM-E2530", status=Status.FAILED_PRECONDITION):
    """A file could not be written. An existing file is unchanged.

    Raised by :func:`integration.cdi.writing.write`.
    """


class CdiInputUnreadable(CdiCommandError, code="NVSHIM-E2531", status=Status.NOT_FOUND):
    """The spec to transform cannot be read. Raised by :mod:`integration.cdi.transforming`."""

    remedy = "name a readable CDI spec"
