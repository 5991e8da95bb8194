"""The table of what a container costs beside containerd's own shim: the README's.

One line for each thing that people ask first, with both values and the ratio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.bench.numbers import short
from tests.bench.pairs import Pair

if TYPE_CHECKING:
    from tests.bench.results import Results

LINES: Final = (
    ("`ctr run --rm` of `true`, no GPU", Pair("runs")),
    ("the same, the first on a node (no fork server yet)", Pair("runs", "cold")),
    (
        "an image with glibc; ours with two simulated GPUs, all capabilities",
        Pair("runs", "gpus", "stock-glibc"),
    ),
    ("the same, the first on a node", Pair("runs", "gpus-cold", "stock-glibc")),
    ("the same with crun, warm", Pair("crun", "gpus", "stock-glibc")),
    ("from `start` to the first answered call", Pair("first-call")),
    ("processor time of a container's life", Pair("cpu")),
    ("the same; ours with two GPUs", Pair("cpu", "gpus")),
    ("ten `ctr run --rm` at once", Pair("at-once-10")),
    ("thirty `ctr run --rm` at once", Pair("at-once-30")),
    ("`ctr tasks exec` of `true`", Pair("exec")),
    ("a gigabyte to stdout", Pair("output")),
    ("`State` calls a second", Pair("state")),
    ("resident memory after many execs, ÷ before", Pair("growth", row="resident")),
    ("memory (PSS) of an idle shim among many", Pair("idle", row="pss")),
    ("the same; ours with two GPUs", Pair("idle", "gpus", row="pss")),
    ("wake-ups of an idle shim in a minute", Pair("idle", row="wakeups")),
    ("many pods of two containers: memory of all shims", Pair("pods", row="pss")),
    ("the same: to create one pod", Pair("pods-create")),
    ("the same: to remove one pod", Pair("pods-remove")),
)
"""In the order in which they are told; what was not measured is left out."""


def cost_lines(results: Results) -> list[tuple[str, ...]]:
    """The cells of the table: what, containerd's own shim, this one, the ratio."""
    lines = []
    for title, pair in LINES:
        if found := pair.find(results):
            values = (f"{short(value)} {found.unit}".strip() for value in (found.stock, found.ours))
            lines.append((title, *values, "" if found.ratio is None else f"{found.ratio:.2f}"))
    return lines
