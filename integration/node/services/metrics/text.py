"""Write all metrics, in the text format 0.0.4 or in OpenMetrics 1.0.

Rules
- prometheus-client writes the text, and chooses the format from the scraper's Accept header. The
  version in the header is ignored: each of the two formats has one version and one media type.
- The value of a label may be a name that a user chose. Control characters and invalid Unicode are
  replaced, and a value is cut after :data:`LONGEST` characters.
- A label with an empty value is left out, which means the same to Prometheus. A metric without
  series is left out.

Source: Prometheus' "Exposition formats"; OpenMetrics 1.0, "Text format".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from prometheus_client.core import Metric as ClientMetric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from integration.node.services.metrics.agent import AGENT, PLUGIN
from integration.node.services.metrics.containers import CONTAINERS
from integration.node.services.metrics.gpus import ACTIVITY, GPUS, HEALTH
from integration.node.services.metrics.metric import Metric, Rows
from integration.node.services.metrics.snapshot import Snapshot
from integration.node.values.counters import SECONDS, Durations

GROUPS: Final = (AGENT, GPUS, ACTIVITY, HEALTH, CONTAINERS, PLUGIN)
"""All metrics by subject, in the order of the output."""

METRICS: Final = tuple(metric for group in GROUPS for metric in group.metrics)

LONGEST: Final = 256


class Form(NamedTuple):
    """A text format of metrics."""

    encode: Callable[[Collector], bytes]  # prometheus-client's writer
    type: str  # its media type


_OPENMETRICS: Final = "application/openmetrics-text"

PLAIN: Final = Form(*choose_encoder("text/plain"))
OPENMETRICS: Final = Form(*choose_encoder(_OPENMETRICS))

# Suffixes that belong to the names of series, by type; prometheus-client's Metric excludes them.
_SUFFIXES: Final = {"counter": "_total", "info": "_info"}


def choose(accept: str) -> Form:
    """Return the format that a scraper accepts.

    Args:
        accept: the request's Accept header; "" if it has none.
    """
    try:
        _, kind = choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is not a number
        return PLAIN
    return OPENMETRICS if kind.startswith(_OPENMETRICS) else PLAIN


def collect(snapshot: Snapshot) -> list[tuple[Metric, Rows]]:
    """Return a copy of the values of every metric, which the agent's counters no longer change."""
    return [(metric, {**metric.rows(snapshot)}) for metric in METRICS]


def write(known: Iterable[tuple[Metric, Rows]], form: Form) -> bytes:
    """Write metrics.

    Args:
        known: the metrics, each once, with their series.
    """
    return form.encode(_Collected([_to_client(metric, rows) for metric, rows in known]))


class _Collected(Collector):
    """The metrics as prometheus-client's encoder reads them."""

    def __init__(self, metrics: Iterable[ClientMetric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[ClientMetric]:
        return (metric for metric in self._metrics if metric.samples)


def _to_client(metric: Metric, rows: Rows) -> ClientMetric:
    name = metric.name.removesuffix(_SUFFIXES.get(metric.kind, ""))
    result = ClientMetric(name, metric.help, metric.kind)
    result.samples = list(_samples(metric, rows))
    return result


def _samples(metric: Metric, rows: Rows) -> Iterator[Sample]:
    for names, value in rows.items():
        pairs = zip(metric.labels, names, strict=True)
        labels = {name: _label(text) for name, text in pairs if text}
        if isinstance(value, Durations):
            yield from _histogram(metric.name, labels, value)
        elif value is not None:
            yield Sample(metric.name, labels, value)


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
