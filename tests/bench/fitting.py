"""Estimate how a cost grows, as a power of its cause.

A cost is mostly a constant and a growing part, and the power of the sum says little about the
growing part. So ``constant + factor * x ** power`` is fitted: a straight line has the power 1 with
any constant, and a parabola has 2.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# Growth below this part of the first value cannot be distinguished from noise.
_NOISE: Final = 0.25
_POWERS: Final = tuple(n / 20 for n in range(5, 81))


def exponent(places: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the power with which values grow, by least squares.

    Args:
        places: the sizes; not negative, rising.

    Returns:
        1 for linear growth; 0 for no growth; None for fewer than three places. The resolution is a
        twentieth, between a quarter and 4.
    """
    if len(places) < 3:
        return None
    if values[-1] - values[0] < _NOISE * abs(values[0]):
        return 0.0
    return min(_POWERS, key=lambda power: _unexplained([x**power for x in places], values))


def _unexplained(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the sum of squares that no straight line through the points explains."""
    slope, constant = statistics.linear_regression(xs, ys)
    return sum((y - constant - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
