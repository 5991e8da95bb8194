"""Errors of the commands that emulate NVIDIA's: E254x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError

# fmt: off
NoCounterpart = IntegrationError.row("NVSHIM-E2541 no-counterpart", Status.UNIMPLEMENTED,
    "A command of NVIDIA's that the shim makes unnecessary; the message names the replacement.")
FlagWithoutMeaning = IntegrationError.row("NVSHIM-E2542 flag-without-meaning", Status.UNIMPLEMENTED,
    "A flag of NVIDIA's that would change the result and is not supported.")
DebugLogUnwritable = IntegrationError.row(
    "NVSHIM-E2543 debug-log-unwritable", Status.FAILED_PRECONDITION,
    "The log file given to ``--debug`` cannot be written.")
ToolkitConfigUnusable = IntegrationError.row(
    "NVSHIM-E2544 toolkit-config-unusable", Status.FAILED_PRECONDITION,
    "NVIDIA's config.toml cannot be read, changed or written.")
