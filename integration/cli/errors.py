"""Errors of the command line itself: E250x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError

# fmt: off
AnswerUnwritten = IntegrationError.row("NVSHIM-E2501 answer-unwritten", Status.RESOURCE_EXHAUSTED,
    "The output could not be written to stdout. The command may have taken effect.")
FileUnusable = IntegrationError.row("NVSHIM-E2502 file-unusable", Status.FAILED_PRECONDITION,
    "A file or directory that the command needs cannot be used.",
    remedy="check the paths in the options, and who may use them")
