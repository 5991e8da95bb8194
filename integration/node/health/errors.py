"""What can go wrong with the health of devices.

Leaves of the tree in :mod:`api.errors`, below :class:`~integration.node.errors.NodeAgentError`::

    NodeAgentError           E27xx
    └── HealthError          E275x, E276x
        ├── XidListWrong     E2755  DP_DISABLE_HEALTHCHECKS or DP_ENABLE_HEALTHCHECKS
        ├── HealthUnknown    E2756  nobody watches the devices
        ├── DeviceUnwatched  E2757  no device of that name is watched
        └── AgentSilent      E2758  the agent does not do what it was asked to
"""

from __future__ import annotations

from api.errors import Status
from integration.node.errors import NodeAgentError


class HealthError(NodeAgentError):
    """Base of what can go wrong with the health of devices."""


class XidListWrong(HealthError):
    """A list of errors that is none. Raised by :func:`integration.node.health.policy.policy_of`."""

    code = "NVSHIM-E2755"
    status = Status.INVALID_ARGUMENT


class HealthUnknown(HealthError):
    """No agent watches the devices of this node, or it does not say what it sees."""

    code = "NVSHIM-E2756"
    status = Status.FAILED_PRECONDITION


class DeviceUnwatched(HealthError):
    """No device of that name is watched."""

    code = "NVSHIM-E2757"
    status = Status.NOT_FOUND


class AgentSilent(HealthError):
    """The agent does not answer. What was asked of it is taken back."""

    code = "NVSHIM-E2758"
    status = Status.UNAVAILABLE
