"""``python -m tests.bench.report JSON…``: print tables in Markdown of the measurements.

All tables come from here, so documents show what was measured. If several files have the same key,
the last file counts. A document marks the place of a table with two comments, which are invisible
in the rendered page::

    <!-- bench: targets -->
    the table replaces this text
    <!-- bench: end -->
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING, Final

from tests.bench.fitting import exponent
from tests.bench.results import Results
from tests.bench.targets import AGENT, COSTS, TARGETS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tests.bench.results import Comparison, Curve, Figures
    from tests.bench.targets import Target

_NOTHING: Final = ""
_PLACE: Final = re.compile(
    r"(?P<start><!-- bench: (?P<name>[a-z0-9-]+) -->\n).*?(?P<end><!-- bench: end -->)", re.DOTALL
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the files, and print or write."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.report", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="JSON", help="written by python -m tests.bench")
    parser.add_argument("--into", nargs="+", metavar="DOCUMENT", default=(), help="to be changed")
    asked = parser.parse_args(arguments)
    results = Results.of_files(asked.files)
    found = tables(results)
    for path in asked.into:
        with open(path, encoding="utf-8") as file:
            document = file.read()
        with open(path, "w", encoding="utf-8") as file:
            file.write(fill(document, found))
    if not asked.into:
        sys.stdout.write(report(results))
    return 0


def tables(results: Results) -> dict[str, str]:
    """Return the tables by their names in documents.

    The names are ``machine``, ``targets``, ``agent-targets``, ``costs``, ``curves`` and the keys of
    comparisons and figures. Tables without measurements are left out.
    """
    found = {
        "machine": _machine(results),
        "targets": targets(results),
        "agent-targets": targets(results, AGENT),
        "costs": costs(results),
        "curves": "\n".join(_curve(curve) for curve in results.curves.values()),
        **{key: _comparison(comparison) for key, comparison in results.comparisons.items()},
        **{f"{key}-figures": _figures(figures) for key, figures in results.figures.items()},
    }
    return {name: text for name, text in found.items() if text}


def costs(results: Results) -> str:
    """Return the most important costs, next to those of containerd's own shim."""
    lines = []
    for title, pair in COSTS:
        if found := pair.find(results):
            values = (f"{short(value)} {found.unit}".strip() for value in (found.stock, found.ours))
            lines.append((title, *values, "" if found.ratio is None else f"{found.ratio:.2f}"))
    return table(("", "runc-v2", "nvidia-v1", "ratio"), lines) if lines else _NOTHING


def report(results: Results) -> str:
    """Return everything as Markdown."""
    parts = [_machine(results), targets(results), targets(results, AGENT)]
    parts += [_comparison(comparison) for comparison in results.comparisons.values()]
    parts += [_figures(figures) for figures in results.figures.values()]
    parts += [_curve(curve) for curve in results.curves.values()]
    return "\n".join(part for part in parts if part)


def targets(results: Results, wanted: Sequence[Target] = TARGETS) -> str:
    """Return the targets and the measured values; empty if nothing was measured."""
    if all(target.found(results) is None for target in wanted):
        return _NOTHING
    lines = []
    for target in wanted:
        seen = target.found(results)
        if seen is None:
            verdict = "not measured"
        elif seen <= target.aim:
            verdict = "better than aimed at" if seen < target.aim else "as aimed at"
        elif target.must is None:
            verdict = "reported"
        else:
            verdict = "reached" if seen <= target.must else "**missed**"
        must = "reported" if target.must is None else f"≤ {ratio(target.must)}"
        found = _NOTHING if seen is None else ratio(seen)
        lines.append((target.title, must, ratio(target.aim), found, verdict))
    return table(("to reach", "must", "aim", "seen", ""), lines)


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown whose columns are aligned for readers of the source.

    Args:
        heads: headings; the first column is text, the others are aligned to the right.
    """
    rows = [tuple(heads), *(tuple(line) for line in lines)]
    widths = [max(3, *(len(row[column]) for row in rows)) for column in range(len(heads))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [
        [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    padded.insert(1, rule)
    return "".join(f"| {' | '.join(row)} |\n" for row in padded)


def _machine(results: Results) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in results.machine.items())
    return f"{facts}\n" if facts else ""


def _comparison(comparison: Comparison) -> str:
    unit = f", {comparison.unit}" if comparison.unit else ""
    lines = []
    for key, row in comparison.rows.items():
        series, ratios = comparison.series(key), comparison.ratios(key)
        told = (_NOTHING, _NOTHING)
        if ratios is not None:
            low, high = ratios.quartiles()
            told = (f"{ratios.median:.2f}", f"{low:.2f}-{high:.2f}")
        lines.append((row.title, short(series.median), short(series.least), *told))
    heads = (f"{comparison.title}{unit}", "median", "least", "ratio", "half of the rounds")
    return table(heads, lines)


def _figures(figures: Figures) -> str:
    others = [column for column in figures.columns if figures.base and column != figures.base]
    heads = [figures.title, *figures.columns.values()]
    heads += [f"÷ {figures.columns[figures.base]}" for _ in others] if figures.base else []
    lines = []
    for key, row in figures.rows.items():
        unit = f" {row.unit}" if row.unit else ""
        values = [
            f"{short(row.values[column])}{unit}" if column in row.values else _NOTHING
            for column in figures.columns
        ]
        ratios = [figures.ratio(key, column) for column in others]
        told = [_NOTHING if each is None else f"{each:.2f}" for each in ratios]
        lines.append((row.title, *values, *told))
    return table(heads, lines)


def _curve(curve: Curve) -> str:
    heads = [
        f"{curve.title}, {curve.unit}, by {curve.axis}",
        *(short(place) for place in curve.places),
        "last ÷ first",
        "grows with the power of",
    ]
    lines = []
    for line in curve.lines.values():
        first, last = line.values[0], line.values[-1]
        fitted = exponent(curve.places, line.values)
        lines.append(
            (line.title, *(short(value) for value in line.values),
             f"{last / first:.2f}" if first else _NOTHING,
             _NOTHING if fitted is None else f"{fitted:.2f}")
        )  # fmt: skip
    return table(heads, lines)


def fill(document: str, tables: Mapping[str, str]) -> str:
    """Insert tables at their places.

    Args:
        tables: by their names; each ends with a newline.

    Returns:
        The text with the tables; a place whose table is missing stays the same.
    """

    def replaced(match: re.Match[str]) -> str:
        table = tables.get(match["name"])
        return match[0] if table is None else f"{match['start']}\n{table}\n{match['end']}"

    return _PLACE.sub(replaced, document)


def places(document: str) -> list[str]:
    """Return the names of a document's tables."""
    return [match["name"] for match in _PLACE.finditer(document)]


def short(value: float) -> str:
    """Return three digits, or all before the decimal point."""
    size = abs(value)
    if value == int(value) and size < 1e6:
        return f"{value:.0f}"
    return f"{value:.2f}" if size < 10 else f"{value:.1f}" if size < 100 else f"{value:.0f}"


def ratio(value: float) -> str:
    """Return two digits after the decimal point; zero is "0"."""
    return f"{value:.2f}" if value else "0"


if __name__ == "__main__":
    sys.exit(main())
