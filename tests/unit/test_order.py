"""A seed determines the order of test files."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.harness.order import files_in_order

ITEMS: Any = [
    SimpleNamespace(path=Path(f"/tests/{file}.py"), name=f"{file}{number}")
    for file in "abcdefgh"
    for number in range(9, 0, -1)
]


def test_files_are_in_another_order_and_whole() -> None:
    found = files_in_order(ITEMS, "1")
    assert sorted(item.name for item in found) == sorted(item.name for item in ITEMS)
    files = [(path, [i.name for i in items]) for path, items in groupby(found, lambda i: i.path)]
    before = [(path, [i.name for i in items]) for path, items in groupby(ITEMS, lambda i: i.path)]
    assert files != before
    assert sorted(files) == before


def test_a_seed_deals_one_order_wherever_the_files_are_found_in() -> None:
    def files(items: list[Any], seed: str) -> list[Path]:
        return [path for path, _ in groupby(files_in_order(items, seed), lambda i: i.path)]

    assert files(ITEMS, "1") == files(ITEMS[::-1], "1")
    assert files(ITEMS, "1") != files(ITEMS, "2")
