"""What was measured, as values: to be told, drawn, judged, and kept in a file.

Three kinds are enough. A :class:`Comparison` has what was measured again and again, side by
side. :class:`Figures` were read once, of each of two things or more. A :class:`Curve` is what
something costs as something else grows.
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
    """What was measured of one thing, in each round or at each place of a curve."""

    title: str  # what it is called in a table
    values: tuple[float, ...]  # what was measured, in the order of the rounds or places
    base: str | None = None  # the key of the row that it is compared with; None for no comparison


@dataclass(frozen=True, slots=True)
class Comparison:
    """Things that were measured side by side, round by round."""

    title: str  # what was done
    unit: str  # of the values
    rows: Mapping[str, Row]  # by their keys

    def series(self, key: str) -> Series:
        """What was measured of one of them."""
        return Series(self.rows[key].values)

    def ratios(self, key: str, base: str | None = None) -> Series | None:
        """One of them over another, round by round.

        Args:
            base: the other; the row's own base if None.

        Returns:
            The ratios; None for a row that is compared with nothing.
        """
        base = base or self.rows[key].base
        return None if base is None else self.series(key).over(self.series(base))


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a table of figures."""

    title: str  # what it says
    unit: str  # of the values
    values: Mapping[str, float]  # by the key of their column; not every column has one


@dataclass(frozen=True, slots=True)
class Figures:
    """A table of figures."""

    title: str  # what they are of
    columns: Mapping[str, str]  # the heading of each column, by its key
    base: str | None  # the column that others are divided by; None for no ratios
    rows: Mapping[str, Figure]  # by their keys

    def ratio(self, row: str, column: str) -> float | None:
        """A figure over that of the base; None if there is nothing to divide by."""
        values = self.rows[row].values
        if self.base is None or column == self.base or column not in values:
            return None
        divisor = values.get(self.base, 0)
        return values[column] / divisor if divisor else None


@dataclass(frozen=True, slots=True)
class Curve:
    """What something costs, as something else grows."""

    title: str  # what costs
    axis: str  # what grows
    unit: str  # of the values
    places: tuple[float, ...]  # how much of it there is, rising
    lines: Mapping[str, Row]  # by their keys; each has a value for each place


@dataclass(frozen=True, slots=True)
class Results:
    """All that one run of the benchmark found out, or a part of it."""

    # what it ran on, and when: a word or two by their names
    machine: Mapping[str, str] = field(default_factory=dict)
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)  # by their keys
    figures: Mapping[str, Figures] = field(default_factory=dict)  # by their keys
    curves: Mapping[str, Curve] = field(default_factory=dict)  # by their keys

    def joined(self, other: Results) -> Results:
        """This and another part of a run; where both have something, the other's."""
        return Results(
            {**self.machine, **other.machine},
            {**self.comparisons, **other.comparisons},
            {**self.figures, **other.figures},
            {**self.curves, **other.curves},
        )

    @classmethod
    def of_files(cls, paths: Iterable[str]) -> Results:
        """What is in files that :meth:`write` wrote; a later one's word counts."""
        return functools.reduce(Results.joined, map(cls.read, paths), cls())

    def write(self, path: str) -> None:
        """Write it as JSON; the file is replaced as a whole."""
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        unfinished = f"{path}.{os.getpid()}"
        with open(unfinished, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=1)
            file.write("\n")
        os.rename(unfinished, path)

    @classmethod
    def read(cls, path: str) -> Self:
        """What :meth:`write` wrote.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no JSON.
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
