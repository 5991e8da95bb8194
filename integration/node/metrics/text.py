"""How metrics are written: Prometheus' text format 0.0.4, and OpenMetrics 1.0.

Rules
- The value of a label may be what somebody called a pod. Whatever it is, the text is read as it
  was meant: backslash, quote and line feed are escaped, other control characters and what is no
  Unicode are replaced, and more than :data:`LONGEST` characters are cut.
- A label without a value is left out, which means the same.
- A family without series is not mentioned.
- Text is written in pieces, so that who writes much can do something else in between.

Source: Prometheus' "Exposition formats"; OpenMetrics 1.0, "Text format".
"""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from integration.node.metrics.counters import SECONDS, Durations
from integration.node.metrics.families import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from integration.node.metrics.families import Family

__all__ = ["LONGEST", "OPENMETRICS", "PLAIN", "Form", "Known", "Row", "choose", "write"]

LONGEST: Final = 256

# Series that are written at a stretch, in about a millisecond.
_PIECE: Final = 200


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
        type: its media type.
        is_openmetrics: whether it is OpenMetrics.
    """

    type: str
    is_openmetrics: bool


PLAIN: Final = Form("text/plain; version=0.0.4; charset=utf-8", is_openmetrics=False)
OPENMETRICS: Final = Form(
    "application/openmetrics-text; version=1.0.0; charset=utf-8", is_openmetrics=True
)

_OPENMETRICS_VERSIONS: Final = frozenset({"", "1.0.0", "0.0.1"})


def choose(accept: str) -> Form:
    """The form that is wanted most, of those that there are.

    Args:
        accept: the request's Accept; "" if it has none.
    """
    best, weight = PLAIN, 0.0
    for each in accept.lower().split(","):
        kind, *parameters = (word.strip() for word in each.split(";"))
        given = dict(word.partition("=")[::2] for word in parameters)
        try:
            q = float(given.get("q", "1"))
        except ValueError:
            continue
        form = None
        if kind == "application/openmetrics-text":
            if given.get("version", "").strip('"') in _OPENMETRICS_VERSIONS:
                form = OPENMETRICS
        elif kind in {"text/plain", "text/*", "*/*"}:
            form = PLAIN
        if form is not None and q > weight:
            best, weight = form, q
    return best


def write(known: Iterable[Known], form: Form) -> Iterator[str]:
    """Write metrics, piece by piece.

    Args:
        known: each family once, with its series.
        form: how they are written.
    """
    for family, rows in known:
        piece: list[str] = []
        begun = False
        for row in rows:
            if not begun:
                piece.append(_head(family, form))
                begun = True
            piece.append(_lines(family, row))
            if len(piece) >= _PIECE:
                yield "".join(piece)
                piece.clear()
        if piece:
            yield "".join(piece)
    if form.is_openmetrics:
        yield "# EOF\n"


@functools.cache
def _head(family: Family, form: Form) -> str:
    name, kind = family.name, family.kind.value
    if form.is_openmetrics:
        # There, the ending belongs to the series and not to the family.
        ending = {Kind.COUNTER: "_total", Kind.INFO: "_info"}.get(family.kind, "")
        name = name.removesuffix(ending)
    elif family.kind is Kind.INFO:
        kind = Kind.GAUGE.value
    return f"# HELP {name} {_escaped(family.help)}\n# TYPE {name} {kind}\n"


def _lines(family: Family, row: Row) -> str:
    labels = _labels(family.labels, row.labels)
    if isinstance(row.value, Durations):
        return _histogram(family.name, labels, row.value)
    return f"{family.name}{{{labels}}} {_number(row.value)}\n" if labels else (
        f"{family.name} {_number(row.value)}\n"
    )  # fmt: skip


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    return ",".join(
        [
            f'{name}="{_label(value)}"'
            for name, value in zip(names, values, strict=True)
            if value
        ]
    )  # fmt: skip


def _histogram(name: str, labels: str, durations: Durations) -> str:
    lines, so_far = [], 0
    bounds = (*(repr(each) for each in SECONDS), "+Inf")
    also = f"{labels}," if labels else ""
    for bound, count in zip(bounds, durations.counts, strict=True):
        so_far += count
        lines.append(f'{name}_bucket{{{also}le="{bound}"}} {so_far}\n')
    of = f"{{{labels}}}" if labels else ""
    lines.append(f"{name}_sum{of} {_number(durations.total)}\n{name}_count{of} {so_far}\n")
    return "".join(lines)


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(int(value))
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


_CONTROL: Final = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@functools.lru_cache(maxsize=4096)
def _label(value: str) -> str:
    if len(value) > LONGEST:
        value = value[: LONGEST - 1] + "…"
    if value.isalnum():
        return value
    return _escaped(_CONTROL.sub("\ufffd", value))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
