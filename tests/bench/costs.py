"""The table of what a container costs beside containerd's own shim: the README's.

One line for each thing that people ask first, with both values and the ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.bench.numbers import short

if TYPE_CHECKING:
    from tests.bench.results import Results


@dataclass(frozen=True, slots=True)
class _Compared:
    """A line of two rows of a comparison."""

    title: str
    key: str
    ours: str = "ours"
    stock: str = "stock"

    def cells(self, results: Results) -> tuple[str, ...] | None:
        comparison = results.comparisons.get(self.key)
        if comparison is None or not {self.ours, self.stock} <= comparison.rows.keys():
            return None
        ratios = comparison.series(self.ours).over(comparison.series(self.stock))
        unit = f" {comparison.unit}" if comparison.unit else ""
        values = (comparison.series(row).median for row in (self.stock, self.ours))
        return (self.title, *(f"{short(value)}{unit}" for value in values), f"{ratios.median:.2f}")


@dataclass(frozen=True, slots=True)
class _Told:
    """A line of two columns of figures."""

    title: str
    key: str
    row: str
    ours: str = "ours"

    def cells(self, results: Results) -> tuple[str, ...] | None:
        figures = results.figures.get(self.key)
        if figures is None or self.row not in figures.rows:
            return None
        row = figures.rows[self.row]
        unit = f" {row.unit}" if row.unit else ""
        if not {"stock", self.ours} <= row.values.keys():
            return None
        values = (row.values[column] for column in ("stock", self.ours))
        ratio = figures.ratio(self.row, self.ours)
        told = "" if ratio is None else f"{ratio:.2f}"
        return (self.title, *(f"{short(value)}{unit}" for value in values), told)


LINES: Final = (
    _Compared("`ctr run --rm` of `true`, no GPU", "runs"),
    _Compared("the same, the first on a node (no fork server yet)", "runs", "cold"),
    _Compared(
        "an image with glibc; ours with two simulated GPUs, all capabilities",
        "runs", "gpus", "stock-glibc",
    ),
    _Compared("the same, the first on a node", "runs", "gpus-cold", "stock-glibc"),
    _Compared("the same with crun, warm", "crun", "gpus", "stock-glibc"),
    _Compared("from `start` to the first answered call", "first-call"),
    _Compared("processor time of a container's life", "cpu"),
    _Compared("the same; ours with two GPUs", "cpu", "gpus"),
    _Compared("ten `ctr run --rm` at once", "at-once-10"),
    _Compared("thirty `ctr run --rm` at once", "at-once-30"),
    _Compared("`ctr tasks exec` of `true`", "exec"),
    _Compared("a gigabyte to stdout", "output"),
    _Compared("`State` calls a second", "state"),
    _Told("resident memory after many execs, ÷ before", "growth", "resident"),
    _Told("memory (PSS) of an idle shim among many", "idle", "pss"),
    _Told("the same; ours with two GPUs", "idle", "pss", "gpus"),
    _Told("wake-ups of an idle shim in a minute", "idle", "wakeups"),
    _Told("many pods of two containers: memory of all shims", "pods", "pss"),
    _Compared("the same: to create one pod", "pods-create"),
    _Compared("the same: to remove one pod", "pods-remove"),
)  # fmt: skip
"""In the order in which they are told; what was not measured is left out."""


def cost_lines(results: Results) -> list[tuple[str, ...]]:
    """The cells of the table: what, containerd's own shim, this one, the ratio."""
    return [cells for line in LINES if (cells := line.cells(results)) is not None]
