"""Compare two versions of an OCI spec.

Objects are compared key by key, lists entry by entry. Values are plain JSON.

An image controls how long a list is and how often an entry repeats. So we first strip the common
start and end of both lists. If the rest is still long, we compare it without regard to order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any, Final

from api.errors import printable

ADDED: Final = "added"
REMOVED: Final = "removed"
CHANGED: Final = "changed"

# SequenceMatcher may compare every pair of entries once per entry.
_MOST_PAIRS: Final = 100_000

_SIGNS: Final = {ADDED: "+", REMOVED: "-", CHANGED: "~"}


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference."""

    path: str  # of the object's key or of the list, with dots ("process.env")
    kind: str  # ADDED, REMOVED or CHANGED
    before: Any = None  # the value or list entry; None if it was added
    after: Any = None  # the value or list entry; None if it was removed

    def to_json(self) -> dict[str, Any]:
        """Return plain values for output."""
        return asdict(self)


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], path: str = ""
) -> list[Difference]:
    """Return the differences between two objects.

    Args:
        before: the first object.
        after: the second object.
        path: the path of both.

    Returns:
        The differences, in the order of the keys.
    """
    found: list[Difference] = []
    for key in dict.fromkeys([*before, *after]):
        where = f"{path}.{key}" if path else key
        old, new = before.get(key), after.get(key)
        if key in before and key in after:
            if type(old) is type(new) and old == new:
                continue
            found += _compare(where, old, new)
        elif key in after:
            found += _flatten(where, new, ADDED)
        else:
            found += _flatten(where, old, REMOVED)
    return found


def _compare(path: str, old: Any, new: Any) -> list[Difference]:
    if isinstance(old, dict) and isinstance(new, dict):
        return differences(old, new, path)
    if isinstance(old, list) and isinstance(new, list):
        return _compare_lists(path, old, new)
    return [Difference(path, CHANGED, old, new)]


def _compare_lists(path: str, old: Sequence[Any], new: Sequence[Any]) -> list[Difference]:
    a, b = ([json.dumps(entry, sort_keys=True) for entry in entries] for entries in (old, new))
    start = _common_length(zip(a, b, strict=False))
    a, b = a[start:], b[start:]
    end = _common_length(zip(reversed(a), reversed(b), strict=False))
    a, b = a[: len(a) - end], b[: len(b) - end]
    old, new = old[start : start + len(a)], new[start : start + len(b)]
    if len(a) * len(b) > _MOST_PAIRS:
        gone, come = Counter(a) - Counter(b), Counter(b) - Counter(a)
        return [
            *(Difference(path, REMOVED, before=each) for each in _select(old, a, gone)),
            *(Difference(path, ADDED, after=each) for each in _select(new, b, come)),
        ]
    found = []
    for tag, i, j, k, m in SequenceMatcher(a=a, b=b, autojunk=False).get_opcodes():
        if tag != "equal":
            found += [Difference(path, REMOVED, before=entry) for entry in old[i:j]]
            found += [Difference(path, ADDED, after=entry) for entry in new[k:m]]
    return found


def _common_length(pairs: Iterable[tuple[str, str]]) -> int:
    """Return how many pairs at the start have two equal parts."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _select(values: Sequence[Any], keys: Iterable[str], counts: Counter[str]) -> Iterator[Any]:
    """Yield the last values of each key, in order, as many as ``counts`` says."""
    left = Counter(keys)
    left.subtract(counts)
    for value, key in zip(values, keys, strict=True):
        left[key] -= 1
        if left[key] < 0:
            yield value


def _flatten(path: str, value: Any, kind: str) -> list[Difference]:
    """Return a difference for each entry of an object or list that only one side has."""
    if isinstance(value, dict) and value:
        found = []
        for key, entry in value.items():
            found += _flatten(f"{path}.{key}", entry, kind)
        return found
    entries = value if isinstance(value, list) and value else [value]
    if kind == ADDED:
        return [Difference(path, kind, after=entry) for entry in entries]
    return [Difference(path, kind, before=entry) for entry in entries]


def render_differences(found: Iterable[Difference]) -> Iterator[str]:
    """Yield the differences as lines for a terminal.

    Args:
        found: the differences in order; those of the same path are grouped.

    Yields:
        Lines without line ends, with control characters escaped.
    """
    last = None
    for each in found:
        if each.path != last:
            last = each.path
            yield printable(each.path)
        sign = _SIGNS[each.kind]
        if each.kind == CHANGED:
            yield printable(f"  {sign} {_text(each.before)} → {_text(each.after)}")
        else:
            yield printable(f"  {sign} {_text(each.after if each.kind == ADDED else each.before)}")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
