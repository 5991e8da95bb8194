"""What can go wrong with the program itself: E250x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class CliError(IntegrationError):
    """Base of what can go wrong with the program itself."""


class AnswerUnwritten(CliError, code="NVSHIM-E2501", status=Status.RESOURCE_EXHAUSTED):
    """The answer could not be written to where stdout leads. What was asked may have been done."""
