"""Measurements as values: to print, to draw, to judge, and to keep in a file.

There are three kinds. A :class:`Comparison` has repeated measurements side by side.
:class:`Figures` were read once, for two things or more. A :class:`Curve` is a cost as a function of
a size.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from tests.bench.interleaving import Series

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True)
class Row:
    """The measurements of one thing, in each round or at each place of a curve."""

    title: str  # its title in a table
    values: tuple[float, ...]  # in the order of the rounds or places
    base: str | None = None  # the key of the baseline's row; None for no comparison


@dataclass(frozen=True, slots=True)
class Comparison:
    """Things that were measured side by side, round by round."""

    title: str  # what was done
    unit: str  # the unit of the values
    rows: Mapping[str, Row]  # by their keys

    def series(self, key: str) -> Series:
        """Return the measurements of one row."""
        return Series(self.rows[key].values)

    def ratios(self, key: str, base: str | None = None) -> Series | None:
        """Return the ratios of one row to another, round by round.

        Args:
            base: the other row; the row's own baseline if None.

        Returns:
            The ratios; None for a row without a baseline.
        """
        base = base or self.rows[key].base
        return None if base is None else self.series(key).over(self.series(base))


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a table of figures."""

    title: str  # its heading
    unit: str  # the unit of the values
    values: Mapping[str, float]  # by the key of their column; not every column has one


@dataclass(frozen=True, slots=True)
class Figures:
    """A table of figures."""

    title: str  # the subject of the table
    columns: Mapping[str, str]  # the heading of each column, by its key
    base: str | None  # the baseline's column; None for no ratios
    rows: Mapping[str, Figure]  # by their keys

    def ratio(self, row: str, column: str) -> float | None:
        """Return a figure divided by the baseline's; None if one of them is missing."""
        values = self.rows[row].values
        if self.base is None or column == self.base or column not in values:
            return None
        divisor = values.get(self.base, 0)
        return values[column] / divisor if divisor else None


@dataclass(frozen=True, slots=True)
class Curve:
    """A cost as a function of a size."""

    title: str  # what was measured
    axis: str  # the size that grows
    unit: str  # the unit of the values
    places: tuple[float, ...]  # the sizes, rising
    lines: Mapping[str, Row]  # by their keys; one value for each place


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one run of the benchmark, or of a part of it."""

    # the machine and the date, as short values by name
    machine: Mapping[str, str] = field(default_factory=dict)
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)  # by their keys
    figures: Mapping[str, Figures] = field(default_factory=dict)  # by their keys
    curves: Mapping[str, Curve] = field(default_factory=dict)  # by their keys

    def joined(self, other: Results) -> Results:
        """Return this and another part of a run; for a shared key, the other's value counts."""
        return Results(
            {**self.machine, **other.machine},
            {**self.comparisons, **other.comparisons},
            {**self.figures, **other.figures},
            {**self.curves, **other.curves},
        )

    @classmethod
    def of_files(cls, paths: Iterable[str]) -> Results:
        """Return the results in files of :meth:`write`; for a repeated key the last file counts."""
        return functools.reduce(Results.joined, map(cls.read, paths), cls())

    def write(self, path: str) -> None:
        """Write the results as JSON; the file is replaced as a whole."""
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        unfinished = f"{path}.{os.getpid()}"
        with open(unfinished, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=1)
            file.write("\n")
        os.rename(unfinished, path)

    @classmethod
    def read(cls, path: str) -> Self:
        """Read a file of :meth:`write`.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not valid JSON.
            KeyError: it is not from this benchmark, or from another version of it.
        """
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        return cls(
            found["machine"],
            {
                key: Comparison(each["title"], each["unit"], _rows(each["rows"]))
                for key, each in found["comparisons"].items()
            },
            {
                key: Figures(
                    each["title"], each["columns"], each["base"],
                    {
                        name: Figure(row["title"], row["unit"], row["values"])
                        for name, row in each["rows"].items()
                    },
                )
                for key, each in found["figures"].items()
            },
            {
                key: Curve(
                    each["title"], each["axis"], each["unit"], tuple(each["places"]),
                    _rows(each["lines"]),
                )
                for key, each in found["curves"].items()
            },
        )  # fmt: skip


def _rows(found: dict[str, Any]) -> dict[str, Row]:
    return {
        key: Row(row["title"], tuple(row["values"]), row.get("base")) for key, row in found.items()
    }
