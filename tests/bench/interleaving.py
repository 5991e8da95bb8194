"""Side-by-side measurements on a machine that is never quiet.

Rules
- Each round measures everything once, and starts with another case. Other programs that slow down
  the machine for a while slow down all cases.
- Two cases are compared within each round; the reported ratio is the median of these ratios.
- One case is measured twice in each round, as if it were two. The ratio of a case to itself is the
  noise, and a smaller difference means nothing.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class Series:
    """The measurements of one case, in the order of the rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Return the median."""
        return statistics.median(self.values)

    @property
    def least(self) -> float:
        """Return the smallest value: the cost when nothing interferes."""
        return min(self.values)

    @property
    def most(self) -> float:
        """Return the largest value."""
        return max(self.values)

    def over(self, base: Series) -> Series:
        """Return the ratios to another series, round by round."""
        return Series(tuple(a / b for a, b in zip(self.values, base.values, strict=True)))

    def quartiles(self) -> tuple[float, float]:
        """Return the quartiles, between which half of the values are."""
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
        cases: functions that measure once and return a number, by name.
        rounds: how often; at least 2.
        warm_up: earlier rounds whose values do not count.
        tell: called with the number of finished rounds.
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
