"""All that Prometheus is told, and how it is written: text format 0.0.4, and OpenMetrics 1.0.

Rules
- prometheus-client writes, and chooses by what the scraper accepts. What the scraper says of a
  version stays there: of the two forms each is written in one way, under one media type.
- The value of a label may be what somebody called a pod. Control characters and what is no
  Unicode are replaced, and more than :data:`LONGEST` characters are cut.
- A label without a value is left out, which means the same. A family without series is not
  mentioned.

Source: Prometheus' "Exposition formats"; OpenMetrics 1.0, "Text format".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from integration.node.services.metrics.agent import AGENT, PLUGIN
from integration.node.services.metrics.containers import CONTAINERS
from integration.node.services.metrics.gpus import GPUS, HEALTH
from integration.node.values.counters import SECONDS, Durations

if TYPE_CHECKING:
    from integration.node.services.metrics.metric import Family, Rows
    from integration.node.services.metrics.snapshot import Moment

GROUPS: Final = (AGENT, GPUS, HEALTH, CONTAINERS, PLUGIN)
"""All families, by what they are of, in the order in which they are written."""

FAMILIES: Final = tuple(family for group in GROUPS for family in group.families)

LONGEST: Final = 256


class Form(NamedTuple):
    """A way to write metrics."""

    encode: Callable[[Collector], bytes]  # prometheus-client's writer
    type: str  # its media type


_OPENMETRICS: Final = "application/openmetrics-text"

PLAIN: Final = Form(*choose_encoder("text/plain"))
OPENMETRICS: Final = Form(*choose_encoder(_OPENMETRICS))

# Endings that belong to the series of a kind, and not to its family.
_ENDINGS: Final = {"counter": "_total", "info": "_info"}


def choose(accept: str) -> Form:
    """The form that a scraper takes.

    Args:
        accept: the request's Accept; "" if it has none.
    """
    try:
        _, kind = choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is no number
        return PLAIN
    return OPENMETRICS if kind.startswith(_OPENMETRICS) else PLAIN


def collect(moment: Moment) -> list[tuple[Family, Rows]]:
    """The values of every family at one moment."""
    return [(family, family.rows(moment)) for family in FAMILIES]


def write(known: Iterable[tuple[Family, Rows]], form: Form) -> bytes:
    """Write metrics.

    Args:
        known: each family once, with its series.
    """
    return form.encode(_Collected([_metric(family, rows) for family, rows in known]))


class _Collected(Collector):
    """What prometheus-client writes."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return (metric for metric in self._metrics if metric.samples)


def _metric(family: Family, rows: Rows) -> Metric:
    name = family.name.removesuffix(_ENDINGS.get(family.kind, ""))
    metric = Metric(name, family.help, family.kind)
    metric.samples = list(_samples(family, rows))
    return metric


def _samples(family: Family, rows: Rows) -> Iterator[Sample]:
    for names, value in rows.items():
        pairs = zip(family.labels, names, strict=True)
        labels = {name: _label(text) for name, text in pairs if text}
        if isinstance(value, Durations):
            yield from _histogram(family.name, labels, value)
        elif value is not None:
            yield Sample(family.name, labels, value)


def _histogram(name: str, labels: dict[str, str], durations: Durations) -> Iterator[Sample]:
    so_far = 0
    bounds = (*(repr(each) for each in SECONDS), "+Inf")
    for bound, count in zip(bounds, durations.counts, strict=True):
        so_far += count
        yield Sample(f"{name}_bucket", {**labels, "le": bound}, so_far)
    yield Sample(f"{name}_sum", labels, durations.total)
    yield Sample(f"{name}_count", labels, so_far)


_CONTROL: Final = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@functools.lru_cache(maxsize=4096)
def _label(value: str) -> str:
    if len(value) > LONGEST:
        value = value[: LONGEST - 1] + "…"
    return _CONTROL.sub("\ufffd", value)
