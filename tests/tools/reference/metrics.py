"""Tables of what Prometheus is told, and the alerts on it."""

from __future__ import annotations

import os
from typing import Any, Final

import yaml

from integration.node.metrics.families import GROUPS
from tests.tools import REPOSITORY
from tests.tools.reference.markdown import code, slug, table

__all__ = ["MONITORING", "alerts", "families", "prometheus_rule", "table_of_alerts"]

MONITORING: Final = os.path.join(REPOSITORY, "integration/kubernetes/manifests/monitoring")


def families() -> str:
    """Every family, by what it is of."""
    parts = []
    for group in GROUPS:
        rows = [
            (
                code(family.name),
                family.kind,
                ", ".join(code(label) for label in family.labels),
                family.help,
            )
            for family in group.families
        ]
        parts.append(f"### {group.title}\n\n{table(('name', 'kind', 'labels', 'meaning'), rows)}")
    return "\n".join(parts)


def alerts() -> list[dict[str, Any]]:
    """The alerting rules."""
    with open(os.path.join(MONITORING, "alerts.yaml"), encoding="utf-8") as file:
        groups = yaml.safe_load(file)["groups"]
    return [rule for group in groups for rule in group["rules"]]


def table_of_alerts() -> str:
    """Which alerts there are."""
    rows = [
        (
            f"[{each['alert']}](#{slug(each['alert'])})",
            each["labels"]["severity"],
            code(" ".join(each["expr"].split())),
            each.get("for", "at once"),
        )
        for each in alerts()
    ]
    return table(("alert", "severity", "when", "for"), rows)


def prometheus_rule() -> str:
    """The alerts as Prometheus' operator has them."""
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
