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
    ("the same; ours with two simulated GPUs", Pair("runs", "gpus", "stock-glibc")),
    ("thirty at once, no GPU", Pair("at-once-30")),
    ("processor time of a container's life; ours with two GPUs", Pair("cpu", "gpus")),
    (
        "memory (PSS) of an idle shim among a hundred; ours with two GPUs",
        Pair("idle", "gpus", row="pss"),
    ),
)
"""What people ask first; docs/performance.md has the rest. What was not measured is left out."""


def cost_lines(results: Results) -> list[tuple[str, ...]]:
    """The cells of the table: what, containerd's own shim, this one, the ratio."""
    lines = []
    for title, pair in LINES:
        if found := pair.find(results):
            values = (f"{short(value)} {found.unit}".strip() for value in (found.stock, found.ours))
            lines.append((title, *values, "" if found.ratio is None else f"{found.ratio:.2f}"))
    return lines
