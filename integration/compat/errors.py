"""Errors of the commands that emulate NVIDIA's: E254x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class CompatError(IntegrationError):
    """Base of what :mod:`integration.compat` raises."""


class NoCounterpart(CompatError, code="NVSHIM-E2541", status=Status.UNIMPLEMENTED):
    """A command of NVIDIA's that the shim makes unnecessary; the message names the replacement."""


class FlagWithoutMeaning(CompatError, code="NVSHIM-E2542", status=Status.UNIMPLEMENTED):
    """A flag of NVIDIA's that would change the result and is not supported."""


class DebugLogUnwritable(CompatError, code="NVSHIM-E2543", status=Status.FAILED_PRECONDITION):
    """The log file given to ``--debug`` cannot be written."""


class ToolkitConfigUnusable(CompatError, code="NVSHIM-E2544", status=Status.FAILED_PRECONDITION):
    """NVIDIA's config.toml cannot be read, changed or written."""
