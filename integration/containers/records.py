"""What of a record (:mod:`hooks.record`) others rely on.

A record is a file, and may be of a version of ours with other words, or damaged: what is of
another shape than it should be is not there.
"""

from __future__ import annotations

from typing import Any


def entries(record: Any, *keys: str) -> list[dict[str, Any]]:
    """The objects of a list in a record.

    Args:
        record: a container's; None for nothing.
        keys: the way to the list.
    """
    return [each for each in _listed(record, keys) if isinstance(each, dict)]


def strings(record: Any, *keys: str) -> list[str]:
    """The words of a list in a record, without those that say nothing.

    Args:
        record: a container's, or an object of it; None for nothing.
        keys: the way to the list.
    """
    return [each for each in _listed(record, keys) if isinstance(each, str) and each]


def _listed(record: Any, keys: tuple[str, ...]) -> list[Any]:
    found = record
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return list(found) if isinstance(found, (list, tuple)) else []
