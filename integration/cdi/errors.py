"""Errors of the commands for CDI spec files: E253x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError

# fmt: off
CdiSpecUnwritten = IntegrationError.row(
    "NVSHIM-E2530 cdi-spec-unwritten", Status.FAILED_PRECONDITION,
    "A file could not be written. An existing file is unchanged.")
CdiInputUnreadable = IntegrationError.row("NVSHIM-E2531 cdi-input-unreadable", Status.NOT_FOUND,
    "The spec to transform cannot be read.",
    remedy="name a readable CDI spec")
