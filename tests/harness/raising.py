"""Expect an error of ours: one of a class, or of a row of the table of errors."""

from __future__ import annotations

from re import Pattern
from typing import TypeAlias, TypeVar

import pytest

from api.errors import ErrorRow, NvshimError

E = TypeVar("E", bound=NvshimError)

Kind: TypeAlias = type[E] | ErrorRow[E]


def raises(
    kind: Kind[E], *others: Kind[E], match: str | Pattern[str] | None = None
) -> pytest.RaisesExc[E]:
    """pytest.raises, which knows no rows: another error of a row's branch fails the test."""
    kinds = (kind, *others)
    branches = tuple(each.branch if isinstance(each, ErrorRow) else each for each in kinds)
    return pytest.raises(
        branches, match=match, check=lambda error: any(is_error(error, each) for each in kinds)
    )


def is_error(error: object, kind: Kind[NvshimError]) -> bool:
    """Whether an error is of a class, or was made by this very row."""
    if not isinstance(kind, ErrorRow):
        return isinstance(error, kind)
    return type(error) is kind.branch and (error.code, error.slug) == (kind.code, kind.slug)
