"""What can go wrong where Prometheus is told something.

Leaves of the tree in :mod:`integration.node.errors`::

    MetricsError
    ├── MetricsAddressInvalid   E2785  it does not say where to listen
    └── MetricsAddressUnusable  E2786  one cannot listen there
"""

from __future__ import annotations

from api.errors import Status
from integration.node.errors import NodeAgentError


class MetricsError(NodeAgentError):
    """Base of what can go wrong where Prometheus is told something."""


class MetricsAddressInvalid(MetricsError):
    """What was said to be an address is none. Raised by :func:`.address.parse_address`."""

    code = "NVSHIM-E2785"
    status = Status.INVALID_ARGUMENT


class MetricsAddressUnusable(MetricsError):
    """Another program listens there, or the address is not this node's. It is tried again."""

    code = "NVSHIM-E2786"
    status = Status.UNAVAILABLE
    remedy = "choose another address for the metrics"
