"""Parse JSON from other programs: API servers, engines, kubelets, users' files.

:func:`json.loads` raises RecursionError for deep nesting. Values that are slightly less deep fail
later, when they are compared, copied or written. No real document has more than :data:`DEEPEST`
levels, so a deeper one counts as invalid.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

__all__ = ["DEEPEST", "MALFORMED", "NestedTooDeeply", "parse_json", "read_each"]

T = TypeVar("T")

DEEPEST: Final = 100
"""The largest allowed depth of nested objects and lists."""


MALFORMED: Final = (ValueError, KeyError, TypeError, AttributeError)
"""The exceptions that reading a document of an unexpected shape raises."""


class NestedTooDeeply(ValueError):
    """A document is nested too deeply."""

    def __init__(self) -> None:
        super().__init__("it is nested too deeply")


def parse_json(content: bytes | str) -> Any:
    """Parse a JSON document.

    Raises:
        ValueError: the text is not valid JSON.
        NestedTooDeeply: the document has more than :data:`DEEPEST` levels.
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise NestedTooDeeply from None
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST + 1):
        if not level:
            return value
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    raise NestedTooDeeply


def read_each(entries: Iterable[Any], read: Callable[[Any], T]) -> tuple[list[T], int]:
    """Read the entries of a list, so that a malformed one does not hide the others.

    Args:
        read: reads one entry; raises one of :data:`MALFORMED` for another shape.

    Returns:
        The results for the valid entries, and how many entries are malformed.
    """
    found, malformed = [], 0
    for each in entries:
        try:
            found.append(read(each))
        except MALFORMED:
            malformed += 1
    return found, malformed
