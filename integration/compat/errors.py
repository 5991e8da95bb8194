"""What NVIDIA's commands are asked that nothing here can do: E254x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError

__all__ = [
    "CompatError",
    "DebugLogUnwritable",
    "FlagWithoutMeaning",
    "NoCounterpart",
    "ToolkitConfigUnusable",
]


class CompatError(IntegrationError):
    """Base of what :mod:`integration.compat` raises."""


class NoCounterpart(CompatError):
    """A command of NVIDIA's that there is no need for here; the message says what replaces it."""

    code = "NVSHIM-E2541"
    status = Status.UNIMPLEMENTED


class FlagWithoutMeaning(CompatError):
    """A flag of NVIDIA's that would change the result, and that nothing here can follow."""

    code = "NVSHIM-E2542"
    status = Status.UNIMPLEMENTED


class DebugLogUnwritable(CompatError):
    """The file that ``--debug`` names cannot be written."""

    code = "NVSHIM-E2543"
    status = Status.FAILED_PRECONDITION


class ToolkitConfigUnusable(CompatError):
    """NVIDIA's config.toml cannot be read, set or written as asked."""

    code = "NVSHIM-E2544"
    status = Status.FAILED_PRECONDITION
