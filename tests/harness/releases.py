"""Releases of Debian whose programs tests run, and which tests `make test` leaves out.

`make test` needs nothing but what bookworm (the machine's own) and trixie have: what is in them
stays as it is. Debian unstable has containerd 2.x, and changes from day to day; what is tested with
it is marked ``newest``, and ``make test-matrix`` runs it.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
from _pytest.mark import ParameterSet

__all__ = ["UNSTABLE", "of_releases"]

UNSTABLE: Final = "sid"
"""Its code name: what is tested with it is marked ``newest``."""


def of_releases(*rows: Any) -> list[ParameterSet]:
    """Values for ``parametrize`` or a fixture's ``params``; those that name unstable are marked.

    Args:
        rows: a release each, a phrase that names one ("runc sid"), or several values.
    """
    return [
        pytest.param(row, marks=[pytest.mark.newest] if _names_unstable(row) else [])
        for row in rows
    ]


def _names_unstable(row: Any) -> bool:
    words = row.split() if isinstance(row, str) else row
    return UNSTABLE in words
