"""What can go wrong with the node agent.

Leaves of the tree in :mod:`api.errors`, below :class:`~integration.errors.IntegrationError`::

    NodeAgentError          E27xx
    ├── AgentRunning        E2701  another one has the node
    ├── AgentStateUnusable  E2702  its directory cannot be used
    ├── PluginError         E2703  and following: see integration.node.plugin.errors
    ├── MpsError            E2735  and following: see integration.node.mps.errors
    ├── MonitorError        E2745  and following: see integration.node.monitor.errors
    ├── HealthError         E2755  and following: see integration.node.health.errors
    ├── LedgerError         E2765  and following: see integration.node.ledger.errors
    └── MetricsError        E2785  and following: see integration.node.metrics.errors
"""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class NodeAgentError(IntegrationError):
    """Base of what can go wrong with the node agent."""


class AgentRunning(NodeAgentError):
    """There is an agent for this node already. Raised by :func:`integration.node.agent.serve`."""

    code = "NVSHIM-E2701"
    status = Status.ALREADY_EXISTS


class AgentStateUnusable(NodeAgentError):
    """Where the agent says how it is cannot be written."""

    code = "NVSHIM-E2702"
    status = Status.FAILED_PRECONDITION
