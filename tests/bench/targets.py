"""What is to be reached, and whether it is: each a figure beside that of containerd's own shim.

A target is met if the median of the ratios within a round is at or below it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.bench.results import Results


@dataclass(frozen=True, slots=True)
class Target:
    """One thing to reach.

    Attributes:
        title: what is measured.
        must: the highest value that is good enough; None where it is only told.
        aim: the value that is wished for.
        seen: finds the value among results; raises KeyError if it was not measured.
        label: what it is called in a chart of ratios; none for what is no ratio.
    """

    title: str
    must: float | None
    aim: float
    seen: Callable[[Results], float]
    label: str = ""

    def found(self, results: Results) -> float | None:
        """The value; None if it was not measured."""
        try:
            return self.seen(results)
        except KeyError:
            return None


def _compared(key: str, row: str, base: str) -> Callable[[Results], float]:
    def seen(results: Results) -> float:
        ratios = results.comparisons[key].ratios(row, base)
        if ratios is None:
            raise KeyError(base)
        return ratios.median

    return seen


def _figure(key: str, row: str, column: str, *, divided: bool = True) -> Callable[[Results], float]:
    def seen(results: Results) -> float:
        figures = results.figures[key]
        value = figures.ratio(row, column) if divided else figures.rows[row].values[column]
        if value is None:
            raise KeyError(column)
        return value

    return seen


TARGETS: Final = (
    Target("`ctr run --rm true`, no GPU, warm, ÷ stock shim", 0.95, 0.80,
           _compared("runs", "ours", "stock"), "a container, warm"),
    Target("the same, cold (the first on a node)", 1.6, 1.35,
           _compared("runs", "cold", "stock"), "a container, cold"),
    Target("with 2 simulated GPUs, all capabilities, warm, ÷ stock shim without GPU", 1.05, 0.92,
           _compared("runs", "gpus", "stock-glibc"), "with 2 GPUs, warm"),
    Target("the same with crun ÷ stock shim with crun", 1.10, 1.00,
           _compared("crun", "gpus", "stock-glibc"), "with 2 GPUs, crun"),
    Target("`start` to first RPC, warm, ÷ stock", 1.0, 0.7,
           _compared("first-call", "ours", "stock"), "start to first call"),
    Target("CPU per lifecycle, warm, ÷ stock", 0.9, 0.6,
           _compared("cpu", "ours", "stock"), "processor time of a life"),
    Target("ten at once, wall, ÷ stock", 0.8, 0.6,
           _compared("at-once-10", "ours", "stock"), "ten at once"),
    Target("PSS of a running idle shim among many, with GPUs, ÷ stock without", 1.5, 1.0,
           _figure("idle", "pss", "gpus"), "memory, with GPUs"),
    Target("idle wake-ups per minute", 0, 0,
           _figure("idle", "wakeups", "gpus", divided=False)),
    Target("pods on one node: total memory ÷ stock", None, 1.0,
           _figure("pods", "pss", "ours"), "pods: memory"),
    Target("the same: time to create them ÷ stock", None, 1.0,
           _compared("pods-create", "ours", "stock"), "pods: create"),
    Target("the same: time to remove them ÷ stock", None, 1.0,
           _compared("pods-remove", "ours", "stock"), "pods: remove"),
)  # fmt: skip
"""In the order in which they are told."""

AGENT: Final = tuple(
    Target(f"{node}: {title}", must, must, _figure("agent", row, column, divided=False))
    for column, node in (("two", "2 GPUs"), ("large", "16 GPUs of 7 MIG devices, 48 shares"))
    for row, title, must in (
        ("allocate-p99", "Allocate, 99 of 100, ms", 5),
        ("unhealthy", "an XID until the kubelet knows, s", 1),
        ("changed", "a device goes until the kubelet knows, s", 1),
        ("idle", "processor while idle, %", 0.2),
    )
)
"""Of the node agent, which is compared with nothing."""
