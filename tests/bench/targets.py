"""The targets, and whether they are met: figures relative to those of containerd's own shim.

A target is met if the median of the ratios within a round is at or below it.

Tried and rejected: stripping docstrings, malloc_trim (0.2 MB per shim); all modules in one
marshalled file (a sixth of the import time, for code that is not what the files say); runc from a
sealed memfd, GOMAXPROCS=1, GOGC=off (1.03, 0.96, 1.05; noise 0.99); a spare that also does the
warm-up (2 ms earlier first answer, 1.7 ms more processor time per pod); a pool refilled after 0.1 s
(noise); huge pages for the fork server (its arenas are scattered: 2 of 24 MB, noise); mounts
without rprivate and rbind (noise); hard links of the driver's libraries in the layer (9 ms, but
programs look for the mounts).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.bench.results import Results


@dataclass(frozen=True, slots=True)
class Values:
    """A pair of measurements: both values, their unit, and the ratio if there is one."""

    stock: float
    ours: float
    unit: str
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Pair:
    """The place of one figure of this shim and that of containerd's own."""

    key: str  # key of the comparison or of the figures
    ours: str = "ours"  # the row of the comparison, or the column of the figures
    stock: str = "stock"  # the same for containerd's own shim
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
    """A single figure without a baseline: key of its table, row and column."""

    key: str
    row: str
    column: str

    def find(self, results: Results) -> float | None:
        """Return the figure; None if it was not measured."""
        figures = results.figures.get(self.key)
        row = figures and figures.rows.get(self.row)
        return row.values.get(self.column) if row else None


@dataclass(frozen=True, slots=True)
class Target:
    """One target."""

    title: str  # what is measured
    must: float | None  # the highest acceptable value; None where it is only reported
    aim: float  # the desired value
    seen: Pair | Figure  # the place of the value: a pair's ratio, or a figure
    label: str = ""  # its label in a chart of ratios; "" for a figure

    def found(self, results: Results) -> float | None:
        """Return the value; None if it was not measured."""
        if isinstance(self.seen, Figure):
            return self.seen.find(results)
        pair = self.seen.find(results)
        return None if pair is None else pair.ratio


TARGETS: Final = (
    Target("`ctr run --rm true`, no GPU, warm, ÷ stock shim", 0.70, 0.65,
           Pair("runs", "ours", "stock"), "a container, warm"),
    Target("the same, cold (the first on a node)", 1.8, 1.35,
           Pair("runs", "cold", "stock"), "a container, cold"),
    Target("with 2 simulated GPUs, all capabilities, warm, ÷ stock shim without GPU", 0.80, 0.74,
           Pair("runs", "gpus", "stock-glibc"), "with 2 GPUs, warm"),
    Target("the same, cold (the first on a node)", 2.2, 1.8,
           Pair("runs", "gpus-cold", "stock-glibc"), "with 2 GPUs, cold"),
    Target("with crun, no GPU, ÷ stock shim with crun", 0.80, 0.80,
           Pair("crun", "ours-glibc", "stock-glibc"), "crun, warm"),
    Target("the same with 2 GPUs", 0.88, 0.88,
           Pair("crun", "gpus", "stock-glibc"), "with 2 GPUs, crun"),
    Target("with NVIDIA's CDI spec applied by the engine ÷ stock without GPU", 0.90, 0.82,
           Pair("cdi", "cdi", "stock"), "after the engine's CDI"),
    Target("`start` to first RPC, warm, ÷ stock", 1.0, 0.7,
           Pair("first-call", "ours", "stock"), "start to first call"),
    Target("processor time of a life, no GPU, ÷ stock", 0.72, 0.65,
           Pair("cpu", "ours", "stock"), "processor time of a life"),
    Target("the same with 2 GPUs", 0.88, 0.78,
           Pair("cpu", "gpus", "stock"), "the same with 2 GPUs"),
    Target("ten at once with 2 GPUs ÷ stock without", 0.80, 0.70,
           Pair("at-once-10", "gpus", "stock-glibc"), "ten at once, with GPUs"),
    Target("exec ÷ stock", 0.95, 0.85,
           Pair("exec", "ours", "stock"), "an exec"),
    Target("the same with all processors busy", 1.05, 1.05,
           Pair("exec-busy", "ours", "stock"), "an exec, busy"),
    Target("the end of a detached container until its exit event, output unread, ÷ stock", 1.2, 1.0,
           Pair("exit", "ours", "stock"), "an exit's event"),
    Target("PSS of a running idle shim among many, with GPUs, ÷ stock without", 1.5, 1.0,
           Pair("idle", "gpus", row="pss"), "memory, with GPUs"),
    Target("idle wake-ups per minute", 0, 0,
           Figure("idle", "wakeups", "gpus")),
    Target("pods on one node: memory that the machine has less ÷ stock", 0.95, 0.85,
           Pair("pods", row="taken"), "pods: the machine's memory"),
    Target("the same: PSS in all ÷ stock", 1.15, 0.95,
           Pair("pods", row="pss"), "pods: PSS"),
    Target("the same: time to create one ÷ stock", 0.90, 0.80,
           Pair("pods-create", "ours", "stock"), "pods: create"),
    Target("the same: time to remove one ÷ stock", 1.0, 1.0,
           Pair("pods-remove", "ours", "stock"), "pods: remove"),
)  # fmt: skip
"""In the order of the report."""

AGENT: Final = tuple(
    Target(f"{node}: {title}", must, aim, Figure("agent", row, column))
    for column, node in (("two", "2 GPUs"), ("large", "16 GPUs of 7 MIG devices, 48 shares"))
    for row, title, must, aim in (
        ("begin", "start until the kubelet has the list, s", 0.2, 0.1),
        ("allocate-p99", "Allocate, 99 of 100, ms", 5, 5),
        ("unhealthy", "an XID until the kubelet knows, s", 0.05, 0.01),
        ("changed", "a device goes until the kubelet knows, s", 1, 1),
        ("idle", "processor while idle, %", 0.2, 0.2),
        ("wakeups", "wake-ups a second while idle", 1, 0.3),
    )
)
"""Targets of the node agent, which has no baseline."""

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
"""The figures that users ask for first; docs/performance.md has the others."""
