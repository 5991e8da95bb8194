"""Read lists from a record of an injection (:mod:`hooks.record`).

A record is a file that another version of this project may have written, and it may be damaged.
Parts of an unexpected type count as missing.
"""

from __future__ import annotations

from typing import Any


def entries(record: Any, *keys: str) -> list[dict[str, Any]]:
    """Return the objects of a list in a record.

    Args:
        record: a container's record; None for an empty one.
        keys: the path to the list.
    """
    return [each for each in _listed(record, keys) if isinstance(each, dict)]


def strings(record: Any, *keys: str) -> list[str]:
    """Return the strings of a list in a record, without empty ones.

    Args:
        record: a container's record, or an object in it; None for an empty one.
        keys: the path to the list.
    """
    return [each for each in _listed(record, keys) if isinstance(each, str) and each]


def _listed(record: Any, keys: tuple[str, ...]) -> list[Any]:
    found = record
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return list(found) if isinstance(found, (list, tuple)) else []
