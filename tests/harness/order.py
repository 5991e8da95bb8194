"""Files of tests in another order, to see that none depends on what ran before it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest


def files_in_order(items: Sequence[pytest.Item], seed: str) -> list[pytest.Item]:
    """The tests, file after file in an order that the seed deals; those of a file as they were."""
    paths = sorted({str(item.path) for item in items})
    random.Random(seed).shuffle(paths)
    rank = {path: number for number, path in enumerate(paths)}
    return sorted(items, key=lambda item: rank[str(item.path)])
