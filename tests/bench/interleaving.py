"""Measuring things side by side on a machine that is never quiet.

Rules
- In a round everything is measured once; each round begins with another one. What slows the
  machine down for a while slows all of them.
- Two things are compared within each round; the ratio that is told is the median of those.
- One thing is measured twice in each round, as if it were two. The ratio of a thing to itself
  is the noise, and no difference below it means anything.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class Series:
    """What was measured of one thing, in the order of the rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def least(self) -> float:
        """The smallest value: what the thing takes when nothing is in its way."""
        return min(self.values)

    @property
    def most(self) -> float:
        """The largest value."""
        return max(self.values)

    def over(self, base: Series) -> Series:
        """The ratios to another series, round by round."""
        return Series(tuple(a / b for a, b in zip(self.values, base.values, strict=True)))

    def quartiles(self) -> tuple[float, float]:
        """Between which half of the values are."""
        low, _, high = statistics.quantiles(self.values, n=4)
        return low, high


def interleave(
    cases: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    warm_up: int = 2,
    tell: Callable[[int], None] = lambda _: None,
) -> dict[str, Series]:
    """Measure each case once in each round.

    Args:
        cases: by name, what measures once and returns a number.
        rounds: how often; at least 2.
        warm_up: rounds before that whose values are thrown away.
        tell: told the number of rounds that are done.
    """
    names = list(cases)
    values: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warm_up + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            value = cases[name]()
            if number >= warm_up:
                values[name].append(value)
        tell(number + 1 - warm_up)
    return {name: Series(tuple(measured)) for name, measured in values.items()}
