"""What NVIDIA's commands are asked that nothing here can do: E254x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class CompatError(IntegrationError):
    """Base of what :mod:`integration.compat` raises."""


class NoCounterpart(CompatError, code="NVSHIM-E2541", status=Status.UNIMPLEMENTED):
    """A command of NVIDIA's that there is no need for here; the message says what replaces it."""


class FlagWithoutMeaning(CompatError, code="NVSHIM-E2542", status=Status.UNIMPLEMENTED):
    """A flag of NVIDIA's that would change the result, and that nothing here can follow."""


class DebugLogUnwritable(CompatError, code="NVSHIM-E2543", status=Status.FAILED_PRECONDITION):
    """The file that ``--debug`` names cannot be written."""


class ToolkitConfigUnusable(CompatError, code="NVSHIM-E2544", status=Status.FAILED_PRECONDITION):
    """NVIDIA's config.toml cannot be read, set or written as asked."""
