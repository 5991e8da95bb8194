"""Side-by-side comparisons: the cases, their titles, and their baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.bench.interleaving import Series, interleave
from tests.bench.results import Comparison, Results, Row
from tests.bench.stage import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that is measured in each round."""

    title: str  # its title in a table
    measure: Callable[[], float]  # measures once and returns a number
    # the key of the baseline's case; None for no comparison
    base: str | None = "stock"


def beside_stock(stock: Callable[[], float], ours: Callable[[], float]) -> dict[str, Case]:
    """Return the cases: containerd's own shim, the same again for the noise, and this shim."""
    return {
        "stock": Case("containerd-shim-runc-v2", stock, None),
        "again": Case("the same again (the noise)", stock),
        "ours": Case("containerd-shim-nvidia-v1", ours),
    }


def compare(
    key: str, title: str, cases: Mapping[str, Case], rounds: int, *, unit: str = "ms"
) -> Results:
    """Measure each case once in each round, after one round that does not count.

    Args:
        cases: by the keys of their rows.
    """
    measured = interleave(
        {name: case.measure for name, case in cases.items()},
        rounds=rounds,
        warm_up=1,
        tell=progress(title, rounds),
    )
    return comparison(key, title, cases, measured, unit=unit)


def comparison(
    key: str,
    title: str,
    cases: Mapping[str, Case],
    measured: Mapping[str, Series],
    *,
    unit: str = "ms",
) -> Results:
    """Return the measurements of cases as results."""
    rows = {name: Row(case.title, measured[name].values, case.base) for name, case in cases.items()}
    return Results(comparisons={key: Comparison(title, unit, rows)})
