"""How metrics are written: Prometheus' text format 0.0.4, and OpenMetrics 1.0.

Rules
- prometheus-client writes, and chooses by what the scraper accepts. What the scraper says of a
  version stays there: of the two forms each is written in one way, under one media type.
- The value of a label may be what somebody called a pod. Control characters and what is no
  Unicode are replaced, and more than :data:`LONGEST` characters are cut.
- A label without a value is left out, which means the same. A family without series is not
  mentioned.
- Text is written in pieces, so that who writes much can do something else in between: a family
  that is large is given to prometheus-client in parts, and has one head all the same.

Source: Prometheus' "Exposition formats"; OpenMetrics 1.0, "Text format".
"""

from __future__ import annotations

import functools
import re
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from integration.node.metrics.counters import SECONDS, Durations
from integration.node.metrics.families import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from integration.node.metrics.families import Family

__all__ = ["LONGEST", "OPENMETRICS", "PLAIN", "Form", "Known", "Row", "choose", "write"]

LONGEST: Final = 256

# Series that are written at a stretch, in two or three milliseconds.
_PIECE: Final = 50


class Row(NamedTuple):
    """One series of a family.

    Attributes:
        labels: the values of the family's labels.
        value: of it; that of a histogram is a :class:`Durations`.
    """

    labels: Sequence[str]
    value: float | Durations


Known = tuple["Family", "Iterable[Row]"]


class Form(NamedTuple):
    """A way to write metrics.

    Attributes:
        encode: prometheus-client's writer.
        type: its media type.
    """

    encode: Callable[[Collector], bytes]
    type: str


_OPENMETRICS: Final = "application/openmetrics-text"

PLAIN: Final = Form(*choose_encoder("text/plain"))
OPENMETRICS: Final = Form(*choose_encoder(_OPENMETRICS))

# The end of all that is told, and not of a piece of it.
_END: Final = b"# EOF\n"

# The lines of a head: what it is, and of which kind.
_HEAD: Final = 2

# Endings that belong to the series of a kind, and not to its family.
_ENDINGS: Final = {Kind.COUNTER: "_total", Kind.INFO: "_info"}


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


def write(known: Iterable[Known], form: Form) -> Iterator[bytes]:
    """Write metrics, piece by piece.

    Args:
        known: each family once, with its series.
        form: how they are written.
    """
    for family, rows in known:
        samples, lines = _samples(family, rows), 0
        while piece := list(islice(samples, _PIECE)):
            name = family.name.removesuffix(_ENDINGS.get(family.kind, ""))
            metric = Metric(name, family.help, family.kind.value)
            metric.samples = piece
            text = form.encode(_Only(metric)).removesuffix(_END)
            yield text.split(b"\n", lines)[lines]
            lines = _HEAD
    if form is OPENMETRICS:
        yield _END


class _Only(Collector):
    """What prometheus-client takes for all that there is."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


def _samples(family: Family, rows: Iterable[Row]) -> Iterator[Sample]:
    for row in rows:
        labels = {
            name: _label(value)
            for name, value in zip(family.labels, row.labels, strict=True)
            if value
        }
        if isinstance(row.value, Durations):
            yield from _histogram(family.name, labels, row.value)
        else:
            yield Sample(family.name, labels, row.value)


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
