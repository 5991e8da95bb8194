"""Errors of the command line itself: E250x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError

# fmt: off
AnswerUnwritten = IntegrationError.row("NVSHIM-E2501 answer-unwritten", Status.RESOURCE_EXHAUSTED,
    "The output could not be written to stdout. The command may have taken effect.")
