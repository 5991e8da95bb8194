"""What can go wrong with the ledger.

Leaves of the tree in :mod:`api.errors`, below :class:`~integration.node.errors.NodeAgentError`::

    LedgerError             E276x
    ├── LedgerUnwritten     E2765  the agent's own file cannot be written
    ├── ClaimUnknown        E2766  nobody claims a device by that name
    ├── ClaimHolds          E2767  a claim is not dead
    ├── ClaimsUnreadable    E2768  who claims what may not be read, or removed
    └── EventNotMade        E2769  the API server does not take an event
"""

from __future__ import annotations

from api.errors import Status
from integration.node.errors import NodeAgentError


class LedgerError(NodeAgentError):
    """Base of what can go wrong with the ledger."""


class LedgerUnwritten(LedgerError):
    """The agent cannot write down who holds what; it goes on, and others are told."""

    code = "NVSHIM-E2765"
    status = Status.FAILED_PRECONDITION


class ClaimUnknown(LedgerError):
    """Nobody claims a device by the name that was given."""

    code = "NVSHIM-E2766"
    status = Status.NOT_FOUND


class ClaimHolds(LedgerError):
    """A claim was to be released whose container may still use its devices."""

    code = "NVSHIM-E2767"
    status = Status.FAILED_PRECONDITION


class ClaimsUnreadable(LedgerError):
    """Who claims what may not be read, or not be removed."""

    code = "NVSHIM-E2768"
    status = Status.PERMISSION_DENIED


class EventNotMade(LedgerError):
    """The API server does not answer, or does not let the agent make an event of a pod."""

    code = "NVSHIM-E2769"
    status = Status.UNAVAILABLE
