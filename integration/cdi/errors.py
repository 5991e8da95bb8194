"""What can go wrong with CDI specs, device nodes and NVIDIA's commands in our words.

Leaves of the tree in :mod:`api.errors`, beside those in :mod:`integration.errors`::

    IntegrationError
    ├── CdiCommandError          E253x  nvshim cdi
    │   ├── CdiSpecUnwritten     E2530
    │   └── CdiInputUnreadable   E2531
    ├── DevicesError             E2535  nvshim devices
    │   ├── DevicesNotMade       E2536
    │   └── ModulesNotLoaded     E2537
    └── CompatError              E254x  nvshim compat
        ├── NoCounterpart        E2541
        ├── FlagWithoutMeaning   E2542
        ├── DebugLogUnwritable   E2543
        └── ToolkitConfigUnusable  E2544
"""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError

__all__ = [
    "CdiCommandError",
    "CdiInputUnreadable",
    "CdiSpecUnwritten",
    "CompatError",
    "DebugLogUnwritable",
    "DevicesError",
    "DevicesNotMade",
    "FlagWithoutMeaning",
    "ModulesNotLoaded",
    "NoCounterpart",
    "ToolkitConfigUnusable",
]


class CdiCommandError(IntegrationError):
    """Base of what :mod:`integration.cdi` raises."""


class CdiSpecUnwritten(CdiCommandError):
    """A file could not be put in place. What was there is still there.

    Raised by :func:`integration.cdi.writing.write`.
    """

    code = "NVSHIM-E2530"
    status = Status.FAILED_PRECONDITION


class CdiInputUnreadable(CdiCommandError):
    """The spec that is to be changed cannot be read. Raised by :mod:`transforming`."""

    code = "NVSHIM-E2531"
    status = Status.NOT_FOUND


class DevicesError(IntegrationError):
    """Base of what :mod:`integration.devices` raises."""


class DevicesNotMade(DevicesError):
    """Some node or link could not be made; the others are.

    Raised by :func:`integration.devices.creating.refuse_failures`.
    """

    code = "NVSHIM-E2536"
    status = Status.FAILED_PRECONDITION


class ModulesNotLoaded(DevicesError):
    """modprobe did not load a module that was asked for.

    Raised by :func:`integration.devices.creating.create`.
    """

    code = "NVSHIM-E2537"
    status = Status.FAILED_PRECONDITION


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
