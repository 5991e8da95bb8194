"""The names of the agent's services, which are also the names of the topics' publishers."""

from __future__ import annotations

from enum import StrEnum


class ServiceName(StrEnum):
    """A service of the agent (:data:`integration.node.service.SERVICES`), or the agent itself."""

    AGENT = "agent"
    """The loop in :mod:`integration.node.agent`, which is not a service but publishes too."""
    PLUGIN = "plugin"
    DRA = "dra"
    CAUSES = "causes"
    LABELS = "labels"
    LEDGER = "ledger"
    HEALTH = "health"
    MEMORY_GUARD = "memory-guard"
    METRICS = "metrics"
    MIG_CONFIG = "mig-config"
    MONITOR = "monitor"
    MPS = "mps"
    NRI = "nri"
    NODE_CONDITION = "node-condition"
    NVSENTINEL = "nvsentinel"
    POD_EVENTS = "pod-events"
