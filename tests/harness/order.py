"""Run test files in a random order, to show that none depends on an earlier one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest


def files_in_order(items: Sequence[pytest.Item], seed: str) -> list[pytest.Item]:
    """Shuffle the test files by a seed; tests within a file keep their order."""
    paths = sorted({str(item.path) for item in items})
    random.Random(seed).shuffle(paths)
    rank = {path: number for number, path in enumerate(paths)}
    return sorted(items, key=lambda item: rank[str(item.path)])
