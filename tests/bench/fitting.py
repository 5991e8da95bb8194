"""How a cost grows: with which power of what grows.

A cost is mostly a constant and a part that grows; the power of the whole is then below that of
the part. So what is above the first value is fitted: with ``cost(x) - cost(first)`` against
``x - first``, a straight line is 1, whatever its constant, and a parabola nears 2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# Growth that is less than this part of the first value is not told from noise.
_NOISE: Final = 0.05


def exponent(places: Sequence[float], values: Sequence[float]) -> float | None:
    """The power with which values grow, by least squares of logarithms.

    Args:
        places: how much there is of what grows, rising.
        values: what it costs at each.

    Returns:
        1 for linear growth; 0 if nothing grows; None if there are fewer than three places.
    """
    if len(places) < 3:
        return None
    if values[-1] - values[0] < _NOISE * abs(values[0]):
        return 0.0
    points = [
        (math.log(place - places[0]), math.log(value - values[0]))
        for place, value in zip(places[1:], values[1:], strict=True)
        if value > values[0]
    ]
    if len(points) < 2:
        return None
    middle = [sum(axis) / len(points) for axis in zip(*points, strict=True)]
    above = sum((x - middle[0]) * (y - middle[1]) for x, y in points)
    below = sum((x - middle[0]) ** 2 for x, _ in points)
    return above / below if below else None
