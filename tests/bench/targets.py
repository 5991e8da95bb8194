"""What is to be reached, and whether it is: each a figure beside that of containerd's own shim.

A target is met if the median of the ratios within a round is at or below it.

What was tried, and left: copying the executed code to one place, stripping docstrings, malloc_trim
(0.2 MB per shim); all modules in one marshalled file (a sixth of the import time, for code that is
not what the files say); runc from a sealed memfd, GOMAXPROCS=1, GOGC=off (1.03, 0.96, 1.05; noise
0.99); a spare that rehearses too (2 ms earlier first answer, 1.7 ms more processor time per pod);
mounts without rprivate and rbind (noise); hard links of the driver's libraries in the layer (9 ms,
but programs look for the mounts).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.bench.results import Results


@dataclass(frozen=True, slots=True)
class Values:
    """What was found of a pair: both values, their unit, and the ratio if there is one."""

    stock: float
    ours: float
    unit: str
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Pair:
    """Where one figure of this shim is beside that of containerd's own."""

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


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure that is compared with nothing: key of its table, row and column."""

    key: str
    row: str
    column: str

    def find(self, results: Results) -> float | None:
        """The figure; None if it was not measured."""
        figures = results.figures.get(self.key)
        row = figures and figures.rows.get(self.row)
        return row.values.get(self.column) if row else None


@dataclass(frozen=True, slots=True)
class Target:
    """One thing to reach."""

    title: str  # what is measured
    must: float | None  # the highest value that is good enough; None where it is only told
    aim: float  # the value that is wished for
    seen: Pair | Figure  # where the value is: a pair's ratio, or a figure itself
    label: str = ""  # what it is called in a chart of ratios; none for what is no ratio

    def found(self, results: Results) -> float | None:
        """The value; None if it was not measured."""
        if isinstance(self.seen, Figure):
            return self.seen.find(results)
        pair = self.seen.find(results)
        return None if pair is None else pair.ratio


TARGETS: Final = (
    Target("`ctr run --rm true`, no GPU, warm, ÷ stock shim", 0.95, 0.80,
           Pair("runs", "ours", "stock"), "a container, warm"),
    Target("the same, cold (the first on a node)", 1.8, 1.35,
           Pair("runs", "cold", "stock"), "a container, cold"),
    Target("with 2 simulated GPUs, all capabilities, warm, ÷ stock shim without GPU", 1.05, 0.92,
           Pair("runs", "gpus", "stock-glibc"), "with 2 GPUs, warm"),
    Target("the same, cold (the first on a node)", 2.2, 1.8,
           Pair("runs", "gpus-cold", "stock-glibc"), "with 2 GPUs, cold"),
    Target("the same with crun ÷ stock shim with crun", 1.10, 1.00,
           Pair("crun", "gpus", "stock-glibc"), "with 2 GPUs, crun"),
    Target("`start` to first RPC, warm, ÷ stock", 1.0, 0.7,
           Pair("first-call", "ours", "stock"), "start to first call"),
    Target("CPU per lifecycle, warm, ÷ stock", 0.9, 0.6,
           Pair("cpu", "ours", "stock"), "processor time of a life"),
    Target("the end of a detached container until its exit event, output unread, ÷ stock", 1.2, 1.0,
           Pair("exit", "ours", "stock"), "an exit's event"),
    Target("ten at once, wall, ÷ stock", 0.8, 0.6,
           Pair("at-once-10", "ours", "stock"), "ten at once"),
    Target("PSS of a running idle shim among many, with GPUs, ÷ stock without", 1.5, 1.0,
           Pair("idle", "gpus", row="pss"), "memory, with GPUs"),
    Target("idle wake-ups per minute", 0, 0,
           Figure("idle", "wakeups", "gpus")),
    Target("pods on one node: total memory ÷ stock", None, 1.0,
           Pair("pods", row="pss"), "pods: memory"),
    Target("the same: time to create them ÷ stock", None, 1.0,
           Pair("pods-create", "ours", "stock"), "pods: create"),
    Target("the same: time to remove them ÷ stock", None, 1.0,
           Pair("pods-remove", "ours", "stock"), "pods: remove"),
)  # fmt: skip
"""In the order in which they are told."""

AGENT: Final = tuple(
    Target(f"{node}: {title}", must, must, Figure("agent", row, column))
    for column, node in (("two", "2 GPUs"), ("large", "16 GPUs of 7 MIG devices, 48 shares"))
    for row, title, must in (
        ("allocate-p99", "Allocate, 99 of 100, ms", 5),
        ("unhealthy", "an XID until the kubelet knows, s", 1),
        ("changed", "a device goes until the kubelet knows, s", 1),
        ("idle", "processor while idle, %", 0.2),
    )
)
"""Of the node agent, which is compared with nothing."""

COSTS: Final = (
    ("`ctr run --rm` of `true`, no GPU", Pair("runs")),
    ("the same; ours with two simulated GPUs", Pair("runs", "gpus", "stock-glibc")),
    ("thirty at once, no GPU", Pair("at-once-30")),
    ("processor time of a container's life; ours with two GPUs", Pair("cpu", "gpus")),
    (
        "memory (PSS) of an idle shim among a hundred; ours with two GPUs",
        Pair("idle", "gpus", row="pss"),
    ),
)
"""What people ask first; docs/performance.md has the rest. What was not measured is left out."""
