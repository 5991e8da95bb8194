"""The Debian releases whose programs tests run, and the tests that `make test` skips.

`make test` needs only programs of bookworm (the machine's own) and trixie, which do not change.
Debian unstable has newer versions and changes daily: tests with its programs are marked ``newest``,
and ``make test-matrix`` runs them.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
from _pytest.mark import ParameterSet

__all__ = ["UNSTABLE", "of_releases"]

UNSTABLE: Final = "sid"
"""The code name of Debian unstable, whose tests are marked ``newest``."""


def of_releases(*rows: Any) -> list[ParameterSet]:
    """Return values for ``parametrize`` or ``params``, with a mark on those that name unstable.

    Args:
        rows: each a release, a phrase that names one ("runc sid"), or several values.
    """
    return [
        pytest.param(row, marks=[pytest.mark.newest] if _names_unstable(row) else [])
        for row in rows
    ]


def _names_unstable(row: Any) -> bool:
    words = row.split() if isinstance(row, str) else row
    return UNSTABLE in words
