"""Recordings of a real Kubernetes, in tests/recorded."""

from __future__ import annotations

import json
from typing import Any, Final

from tests.harness.launcher import REPOSITORY

__all__ = ["RECORDED", "recorded_lines"]

RECORDED: Final = f"{REPOSITORY}/tests/recorded/kubernetes-1.36"


def recorded_lines(name: str) -> list[Any]:
    """Return the values of a file with one JSON value per line.

    Args:
        name: a path below the recordings of Kubernetes 1.36.
    """
    with open(f"{RECORDED}/{name}", encoding="utf-8") as file:
        return [json.loads(line) for line in file]
