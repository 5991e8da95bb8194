"""Errors of the command line itself: E250x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class CliError(IntegrationError):
    """Base of the command line's own errors."""


class AnswerUnwritten(CliError, code="NVSHIM-E2501", status=Status.RESOURCE_EXHAUSTED):
    """The output could not be written to stdout. The command may have taken effect."""
