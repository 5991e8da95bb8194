"""Trees of JSON and YAML, as far as CDI specs need them: no more types than they have.

Both formats become dicts, lists, texts, numbers, truth values and None. A YAML scalar without
quotes is a text that may also be meant as a number or truth value; which, depends on the field,
so it stays a :class:`Plain` until then (YAML's own guesses make a number of ``1:0``).

Rules
- Bounded before it is built: the depth, and the number of values, each use of an alias counted
  with all that is in it.
- A key that is there twice is an error: two readers would see different files.
- Of YAML: one document, no tags but the standard ones for what is above, no merge keys.

Source: RFC 8259; YAML 1.2, chapters 3 and 10.3.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BadTree", "Plain", "of_json", "of_yaml"]

DEEPEST: Final = 32
MOST_VALUES: Final = 200_000

_NULLS: Final = frozenset({"", "~", "null", "Null", "NULL"})
_TAG: Final = "tag:yaml.org,2002:"


class BadTree(Exception):
    """The text is no tree of this kind; ``str()`` of it says why.

    Whoever knows the file makes an error for people of it.
    """


class Plain(str):
    """A YAML scalar without quotes."""

    __slots__ = ()


def of_json(text: str) -> Any:
    """The tree of a JSON text.

    Args:
        text: the text.

    Raises:
        BadTree: it is no JSON, or is out of the bounds of this module's head.
    """
    try:
        tree = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise BadTree(f"no JSON: {error}") from error
    _measure(tree)
    return tree


def of_yaml(text: str) -> Any:
    """The tree of a YAML text.

    Args:
        text: the text.

    Raises:
        BadTree: it is no YAML, is out of the bounds of this module's head, or there is no
            parser of YAML here.
    """
    try:
        import yaml  # noqa: PLC0415 - 15 ms that JSON does not pay
    except ImportError as error:
        raise BadTree(f"YAML, and PyYAML cannot be loaded here: {error}") from error
    # Events come one by one from libyaml, so that nothing is built that is too deep or too much.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    builder = _Builder()
    try:
        for event in yaml.parse(text, Loader=loader):
            builder.take(event)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadTree(f"no YAML: {error}") from error
    return builder.tree


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} is there twice")
            seen.add(key)
    return tree


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _measure(tree: Any) -> None:
    count = 0
    level = [tree]
    for _ in range(DEEPEST):
        level = [entry for value in level for entry in _below(value)]
        count += len(level)
        if not level:
            break
    if level or count > MOST_VALUES:
        raise BadTree("it is deeper or larger than any that is meant")


def _below(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


@dataclass(slots=True)
class _Open:
    """A list or mapping that is being read; ``size`` is how many values are in it so far."""

    made: Any
    anchor: str | None
    line: int
    key: str | None = None
    size: int = 1


class _Builder:
    """Makes a tree of the events of a YAML parser."""

    def __init__(self) -> None:
        self.tree: Any = None
        self._open: list[_Open] = []
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._count = 0
        self._documents = 0

    def take(self, event: Any) -> None:
        """Takes the next event.

        Raises:
            BadTree: the tree would break a rule of this module's head.
        """
        line = event.start_mark.line + 1
        match type(event).__name__:
            case "DocumentStartEvent":
                self._documents += 1
                if self._documents > 1:
                    raise BadTree(f"line {line}: a second document")
            case "ScalarEvent":
                self._put(_scalar(event, line), 1, line, event.anchor)
            case "AliasEvent":
                if event.anchor not in self._anchors:
                    raise BadTree(f"line {line}: no value is called &{event.anchor} here")
                self._put(*self._anchors[event.anchor], line)
            case "MappingStartEvent" | "SequenceStartEvent":
                mapping = type(event).__name__ == "MappingStartEvent"
                _check_tag(event, "map" if mapping else "seq", line)
                if len(self._open) >= DEEPEST:
                    raise BadTree(f"line {line}: it is deeper than any that is meant")
                if self._is_at_key():
                    raise BadTree(f"line {line}: a key that is no text")
                self._open.append(_Open({} if mapping else [], event.anchor, line))
            case "MappingEndEvent" | "SequenceEndEvent":
                done = self._open.pop()
                self._count -= done.size - 1
                self._put(done.made, done.size, done.line, done.anchor)

    def _is_at_key(self) -> bool:
        return bool(
            self._open and isinstance(self._open[-1].made, dict) and self._open[-1].key is None
        )

    def _put(self, value: Any, size: int, line: int, anchor: str | None = None) -> None:
        self._count += size
        if self._count > MOST_VALUES:
            raise BadTree(f"line {line}: it is larger than any that is meant")
        if anchor is not None:
            self._anchors[anchor] = value, size
        if not self._open:
            self.tree = value
            return
        into = self._open[-1]
        into.size += size
        if isinstance(into.made, list):
            into.made.append(value)
        elif into.key is None:
            if not isinstance(value, str):
                raise BadTree(f"line {line}: a key that is no text")
            if value in into.made:
                raise BadTree(f"line {line}: the key {str(value)!r} is there twice")
            if value == "<<":
                raise BadTree(f"line {line}: merge keys are not supported")
            into.key = str(value)
        else:
            into.made[into.key] = value
            into.key = None


def _scalar(event: Any, line: int) -> Any:
    plain = not event.style and event.implicit[0]  # libyaml says "", PyYAML itself None
    if plain and event.value in _NULLS:
        return None
    if plain:
        return Plain(event.value)
    if event.tag in {f"{_TAG}int", f"{_TAG}bool"}:
        return Plain(event.value)
    _check_tag(event, "str", line)
    return event.value


def _check_tag(event: Any, kind: str, line: int) -> None:
    if event.tag not in {None, "!", f"{_TAG}{kind}"}:
        raise BadTree(f"line {line}: the tag {event.tag}")
