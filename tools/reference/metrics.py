"""Tables of the Prometheus metrics, and the alerts for Prometheus' operator."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any, Final

import yaml

from integration.node.services.metrics.text import GROUPS
from tools import REPOSITORY
from tools.reference.markdown import code, table

__all__ = ["MONITORING", "alerts", "families", "prometheus_rule"]

MONITORING: Final = os.path.join(REPOSITORY, "integration/kubernetes/manifests/monitoring")


# Up to this many families with the same labels list them.
_FEW: Final = 3


def families() -> str:
    """Return every family, by its subject."""
    parts = []
    for group in GROUPS:
        [(common, count)] = Counter(family.labels for family in group.metrics).most_common(1)
        common = common if count > _FEW else ()
        rows = [
            (code(family.name), family.kind, _labels(family.labels, common), family.help)
            for family in group.metrics
        ]
        said = f"Labels, unless others are named: {_listed(common)}.\n\n" if common else ""
        parts.append(
            f"### {group.title}\n\n{said}{table(('name', 'kind', 'labels', 'meaning'), rows)}"
        )
    return "\n".join(parts)


def _labels(labels: tuple[str, ...], common: tuple[str, ...]) -> str:
    """Return a family's labels, with ``…`` for those that most of its group have."""
    if not common or labels[: len(common)] != common:
        return _listed(labels) or ("none" if common else "")
    more = labels[len(common) :]
    return f"…, {_listed(more)}" if more else ""


def _listed(labels: tuple[str, ...]) -> str:
    return ", ".join(code(label) for label in labels)


def alerts() -> list[dict[str, Any]]:
    """Return the alerting rules."""
    with open(os.path.join(MONITORING, "alerts.yaml"), encoding="utf-8") as file:
        groups = yaml.safe_load(file)["groups"]
    return [rule for group in groups for rule in group["rules"]]


def prometheus_rule() -> str:
    """Return the alerts as a PrometheusRule of Prometheus' operator."""
    with open(os.path.join(MONITORING, "alerts.yaml"), encoding="utf-8") as file:
        groups = file.read()
    head = (
        "# The alerts of manifests/monitoring/alerts.yaml for Prometheus' operator. Made by `make\n"
        "# reference`: change those.\n"
        "apiVersion: monitoring.coreos.com/v1\n"
        "kind: PrometheusRule\n"
        "metadata:\n"
        "  name: node-agent\n"
        "  namespace: containerd-shim-nvidia\n"
        "spec:\n"
    )
    body = groups[groups.index("groups:") :]
    return head + "".join(f"  {line}" if line.strip() else line for line in body.splitlines(True))
