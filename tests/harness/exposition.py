"""The agent's metrics, as the parsers of Prometheus' own client library read them."""

from __future__ import annotations

from typing import Any, NamedTuple

from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser

__all__ = ["Told", "read_told"]

Labels = tuple[tuple[str, str], ...]


class Told(NamedTuple):
    """A metric family."""

    name: str  # without the suffix of its type
    kind: str  # "gauge", "counter"
    # the value of each series, by its name and labels
    series: dict[tuple[str, Labels], float]


def read_told(text: str) -> dict[str, Told]:
    """Parse an answer in either format; a duplicate series fails the test."""
    module: Any = openmetrics_parser if text.endswith("# EOF\n") else parser
    found: dict[str, Told] = {}
    for family in module.text_string_to_metric_families(text):
        told = found.setdefault(family.name, Told(family.name, family.type, {}))
        for sample in family.samples:
            series = (sample.name, tuple(sorted(sample.labels.items())))
            assert series not in told.series, f"{series} appears twice"
            told.series[series] = sample.value
    return found
