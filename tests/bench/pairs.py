"""One figure of this shim beside that of containerd's own, wherever it is among the results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.bench.results import Results


@dataclass(frozen=True, slots=True)
class Values:
    """What was found: both values, their unit, and the ratio if there is one."""

    stock: float
    ours: float
    unit: str
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Pair:
    """Where both are."""

    key: str  # of the comparison or of the figures
    ours: str = "ours"  # the row of the comparison, or the column of the figures
    stock: str = "stock"  # likewise
    row: str = ""  # the row of the figures; "" for a comparison

    def find(self, results: Results) -> Values | None:
        """Find both; None if they were not measured."""
        try:
            return self._among_figures(results) if self.row else self._compared(results)
        except KeyError:
            return None

    def _compared(self, results: Results) -> Values:
        comparison = results.comparisons[self.key]
        ours, stock = comparison.series(self.ours), comparison.series(self.stock)
        return Values(stock.median, ours.median, comparison.unit, ours.over(stock).median)

    def _among_figures(self, results: Results) -> Values:
        figures = results.figures[self.key]
        row = figures.rows[self.row]
        ratio = figures.ratio(self.row, self.ours)
        return Values(row.values[self.stock], row.values[self.ours], row.unit, ratio)
