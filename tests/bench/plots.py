"""Two kinds of charts: how something grows, and ratios beside what they have to be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.bench.svg import CHARACTER, Picture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.results import Curve

_WIDTH: Final = 440.0
_HEIGHT: Final = 250.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 28.0, 48.0, 42.0
_TICKS: Final = 5

# The colour and the mark of a line, by its key; those of other lines follow.
_KINDS: Final = {"stock": 3, "ours": 0, "gpus": 1, "first": 2}

_BAR_LABELS: Final = 190.0
_BAR_WIDTH: Final = 640.0
_BAR_STEP: Final = 26.0
_BAR_HEIGHT: Final = 14.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio in a chart of ratios."""

    label: str  # what it is of
    value: float  # the ratio
    must: float | None  # what it has to be at most; None for nothing
    aim: float  # what it is wished to be


def curve_chart(curve: Curve) -> str:
    """A chart of how something grows; both axes are linear, so that a line is a line.

    Returns:
        The SVG file's content.
    """
    picture = Picture(_WIDTH, _HEIGHT, f"{curve.title} ({curve.unit}) by {curve.axis}")
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    ups = ticks(max(max(line.values) for line in curve.lines.values()))
    alongs = ticks(curve.places[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (right - _LEFT) * x / alongs[-1],
            bottom - (bottom - _TOP) * y / ups[-1],
        )

    picture.text(8, 16, f"{curve.title}, by {curve.axis}", "bold")
    for tick in ups:
        _, y = place(0, tick)
        picture.line(_LEFT, y, right, y, "grid" if tick else "axis")
        picture.text(_LEFT - 6, y + 4, _number(tick), "small end")
    for tick in alongs:
        x, _ = place(tick, 0)
        picture.line(x, bottom, x, bottom + 4, "axis")
        picture.text(x, bottom + 17, _number(tick), "small middle")
    picture.text((_LEFT + right) / 2, _HEIGHT - 8, curve.axis, "small middle")
    upright = f"translate(14 {(_TOP + bottom) / 2:g}) rotate(-90)"
    picture.shape("text", "small middle", transform=upright).text = curve.unit
    legend = 12.0
    for number, (key, line) in enumerate(curve.lines.items()):
        kind = _KINDS.get(key, number)
        points = [place(x, y) for x, y in zip(curve.places, line.values, strict=True)]
        picture.points("polyline", points, f"line s{kind}")
        for x, y in [*points, (legend + 5, 32.0)]:
            picture.points("polygon", _mark(kind, x, y), f"f{kind}")
        picture.text(legend + 14, 36, line.title)
        legend += 26 + CHARACTER * len(line.title)
    return picture.render()


def bar_chart(title: str, bars: Sequence[Bar], *, one: str) -> str:
    """A chart of ratios, each beside what it has to be.

    Args:
        title: what all are ratios of.
        bars: from above to below.
        one: what a ratio of 1 means.

    Returns:
        The SVG file's content.
    """
    top = 62.0
    bottom = top + _BAR_STEP * len(bars)
    picture = Picture(_BAR_WIDTH, bottom + 28, title)
    # One that is far off would leave no room for the others; its number is told.
    most = max((bar.value for bar in bars), default=1)
    most = min(max(most, *(bar.must or 1 for bar in bars), 1.2), 3.0) if bars else 1.2
    along = ticks(most)
    width = _BAR_WIDTH - _BAR_LABELS - 56

    def place(value: float) -> float:
        return _BAR_LABELS + width * min(value, along[-1]) / along[-1]

    picture.text(8, 18, title, "bold")
    picture.line(8, 34, 8, 46, "mark")
    picture.text(14, 44, "must", "small")
    picture.line(52, 34, 52, 46, "mark dashed")
    picture.text(58, 44, "aim", "small")
    picture.text(90, 44, f"1 is {one}; shorter is better", "small")
    for tick in along:
        picture.line(place(tick), top - 4, place(tick), bottom, "axis" if tick == 1 else "grid")
        picture.text(place(tick), bottom + 16, _number(tick), "small middle")
    for number, bar in enumerate(bars):
        y = top + _BAR_STEP * number
        picture.text(_BAR_LABELS - 8, y + 12, bar.label, "end")
        limit = bar.aim if bar.must is None else bar.must
        picture.shape(
            "rect", "f2" if bar.value <= limit else "f1", x=_BAR_LABELS, y=y + 1,
            width=place(bar.value) - _BAR_LABELS, height=_BAR_HEIGHT,
        )  # fmt: skip
        if bar.must is not None:
            picture.line(place(bar.must), y - 2, place(bar.must), y + 18, "mark")
        picture.line(place(bar.aim), y - 2, place(bar.aim), y + 18, "mark dashed")
        picture.text(_BAR_LABELS + width + 8, y + 12, f"{bar.value:.2f}", "bold")
    return picture.render()


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to at least ``most``, a handful of them."""
    if most <= 0:
        return [0.0, 1.0]
    raw = most / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    return [round(step * number, 10) for number in range(math.ceil(most / step - 1e-9) + 1)]


def _mark(kind: int, x: float, y: float) -> list[tuple[float, float]]:
    """A shape around a point, another for each kind."""
    r = 3.6
    shapes = {
        0: [(-r, -r), (r, -r), (r, r), (-r, r)],
        1: [(0, -1.3 * r), (1.2 * r, r), (-1.2 * r, r)],
        2: [(0, 1.3 * r), (1.2 * r, -r), (-1.2 * r, -r)],
        3: [(0, -1.3 * r), (1.3 * r, 0), (0, 1.3 * r), (-1.3 * r, 0)],
    }
    return [(x + dx, y + dy) for dx, dy in shapes[kind % len(shapes)]]


def _number(value: float) -> str:
    return f"{value:,.10g}".replace(",", "\N{NARROW NO-BREAK SPACE}")
