"""What can go wrong with spec files that a person names: E253x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class CdiCommandError(IntegrationError):
    """Base of what :mod:`integration.cdi` raises."""


class CdiSpecUnwritten(CdiCommandError, code="NVSHIM-E2530", status=Status.FAILED_PRECONDITION):
    """A file could not be put in place. What was there is still there.

    Raised by :func:`integration.cdi.writing.write`.
    """


class CdiInputUnreadable(CdiCommandError, code="NVSHIM-E2531", status=Status.NOT_FOUND):
    """The spec that is to be changed cannot be read. Raised by :mod:`transforming`."""

    remedy = "name a CDI spec that can be read"
