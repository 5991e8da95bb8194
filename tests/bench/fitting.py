"""How a cost grows: with which power of what grows.

A cost is mostly a constant and a part that grows; the power of the whole says little of that of
the part. So ``constant + factor * x ** power`` is fitted: a straight line has the power 1, whatever
its constant, and a parabola 2.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# Growth that is less than this part of the first value is not told from noise.
_NOISE: Final = 0.25
_POWERS: Final = tuple(n / 20 for n in range(5, 81))


def exponent(places: Sequence[float], values: Sequence[float]) -> float | None:
    """The power with which values grow, by least squares.

    Args:
        places: how much there is of what grows; not negative, rising.

    Returns:
        1 for linear growth; 0 if nothing grows; None if there are fewer than three places. A
        twentieth is told from the next, between a quarter and 4.
    """
    if len(places) < 3:
        return None
    if values[-1] - values[0] < _NOISE * abs(values[0]):
        return 0.0
    return min(_POWERS, key=lambda power: _unexplained([x**power for x in places], values))


def _unexplained(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The sum of squares that no straight line through the points explains."""
    slope, constant = statistics.linear_regression(xs, ys)
    return sum((y - constant - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
