"""All that Prometheus is told, in order: the tables of each subject, and their values now."""

from __future__ import annotations

from typing import Final

from integration.node.metrics.agent import AGENT, PLUGIN
from integration.node.metrics.containers import CONTAINERS
from integration.node.metrics.family import Family, Rows
from integration.node.metrics.gpus import GPUS, HEALTH
from integration.node.metrics.moment import Moment

GROUPS: Final = (AGENT, GPUS, HEALTH, CONTAINERS, PLUGIN)
"""All families, by what they are of."""

FAMILIES: Final = tuple(family for group in GROUPS for family in group.families)
"""All families, in the order in which they are written."""


def collect(moment: Moment) -> list[tuple[Family, Rows]]:
    """The values of every family at one moment."""
    return [(family, family.rows(moment)) for family in FAMILIES]
