"""What an agent tells Prometheus, as the parsers of Prometheus' own client library read it."""

from __future__ import annotations

from typing import Any, NamedTuple

from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser

__all__ = ["Told", "read_told"]

Labels = tuple[tuple[str, str], ...]


class Told(NamedTuple):
    """A family as it was read."""

    name: str  # without the ending of its kind
    kind: str  # "gauge", "counter"
    # names of series and their labels, with the value of each
    series: dict[tuple[str, Labels], float]


def read_told(text: str) -> dict[str, Told]:
    """Read a whole answer of either form; a series that is there twice fails the test."""
    module: Any = openmetrics_parser if text.endswith("# EOF\n") else parser
    found: dict[str, Told] = {}
    for family in module.text_string_to_metric_families(text):
        told = found.setdefault(family.name, Told(family.name, family.type, {}))
        for sample in family.samples:
            series = (sample.name, tuple(sorted(sample.labels.items())))
            assert series not in told.series, f"{series} is told twice"
            told.series[series] = sample.value
    return found
