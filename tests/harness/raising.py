"""Expect one of our errors, by class or by row of the error table."""

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
    """Like pytest.raises, but with rows, too: another error of the row's branch fails the test."""
    kinds = (kind, *others)
    branches = tuple(each.branch if isinstance(each, ErrorRow) else each for each in kinds)
    return pytest.raises(
        branches, match=match, check=lambda error: any(is_error(error, each) for each in kinds)
    )


def is_error(error: object, kind: Kind[NvshimError]) -> bool:
    """Return whether an error is an instance of a class, or was made from this row."""
    if not isinstance(kind, ErrorRow):
        return isinstance(error, kind)
    return type(error) is kind.branch and (error.code, error.slug) == (kind.code, kind.slug)
