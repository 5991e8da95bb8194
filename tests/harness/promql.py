"""The metrics in PromQL expressions, and the expressions of the dashboard.

Prometheus' own parser only tells whether an expression is valid, and not which metrics it uses. So
this module takes a valid expression, and removes everything that is not the name of a metric.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any, Final

from tools.reference.metrics import MONITORING

__all__ = ["dashboard", "metrics_in", "queries"]

_STRING: Final = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|`[^`]*`')
_COMMENT: Final = re.compile(r"#[^\n]*")
_LABELS: Final = re.compile(r"\{[^{}]*\}")
_RANGE: Final = re.compile(r"\[[^][]*\]")
_LISTS: Final = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^()]*\)")
_NAME: Final = re.compile(r"(?<![0-9.\w:])([a-zA-Z_:][\w:]*)(?!\s*\()\b(?!\s*\()")
_WORDS: Final = frozenset({
    "and", "or", "unless", "bool", "offset", "by", "without", "on", "ignoring", "group_left",
    "group_right", "inf", "nan", "atan2",
})  # fmt: skip


def metrics_in(expression: str) -> set[str]:
    """Return the names of the metrics in a valid expression."""
    text = expression
    for pattern in (_STRING, _COMMENT, _LABELS, _RANGE, _LISTS):
        text = pattern.sub(" ", text)
    text = re.sub(r"\boffset\s+-?\w+", " ", text)
    return {name for name in _NAME.findall(text) if name.lower() not in _WORDS}


def dashboard() -> dict[str, Any]:
    """Load the dashboard, as Grafana imports it."""
    with open(os.path.join(MONITORING, "dashboard.json"), encoding="utf-8") as file:
        document: dict[str, Any] = json.load(file)
    return document


def queries() -> list[str]:
    """Return every query of the dashboard."""
    return [
        target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())
    ]
