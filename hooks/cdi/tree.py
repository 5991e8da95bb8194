"""Parse JSON and YAML to trees that have only the types of CDI specs.

Both formats become dicts, lists, texts, numbers, booleans and None. Whether a YAML scalar without
quotes is a text, a number or a boolean depends on its field, so it stays a :class:`Plain` until
then (YAML itself would read ``1:0`` as a number).

Rules
- Depth and number of values are limited while the tree is built; each use of an alias counts with
  all its content.
- A duplicate key is an error, because readers would differ on its value.
- Of YAML, only this is allowed: one document, no tags except the standard ones for these types, no
  merge keys.

Tables of fields describe how to read a tree. A reader is a function of a value and its walk. It
returns the result, or ends the walk with an error that names the place. Readers of lists and
objects also have the inverse, ``tree``.

Source: RFC 8259; YAML 1.2, chapters 3 and 10.3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final, NoReturn, TypeAlias

import yaml

from hooks.cdi.errors import CdiSpecInvalid

DEEPEST: Final = 32
MOST_VALUES: Final = 200_000

_NULLS: Final = frozenset({"", "~", "null", "Null", "NULL"})
_TAG: Final = "tag:yaml.org,2002:"


class BadTree(Exception):
    """The text cannot be parsed to such a tree; ``str()`` gives the reason.

    The caller, which knows the file, turns this into an error for users.
    """


class Plain(str):
    """A YAML scalar without quotes."""

    __slots__ = ()


def of_json(text: str) -> Any:
    """Parse a JSON text to a tree.

    Raises:
        BadTree: it is not valid JSON, or exceeds the bounds in this module's docstring.
    """
    try:
        tree = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise BadTree(f"not valid JSON: {error}") from error
    _measure(tree)
    return tree


def of_yaml(text: str) -> Any:
    """Parse a YAML text to a tree.

    Raises:
        BadTree: it is not valid YAML, or exceeds the bounds in this module's docstring.
    """
    # libyaml yields events one by one, so parsing stops at the limits.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    builder = _Builder()
    try:
        for event in yaml.parse(text, Loader=loader):
            builder.take(event)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadTree(f"not valid YAML: {error}") from error
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
    raise ValueError(f"{constant} is not a JSON number")


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
    """A list or mapping during parsing; ``size`` counts its values so far."""

    made: Any
    anchor: str | None
    line: int
    key: str | None = None
    size: int = 1


class _Builder:
    """Builds a tree from the events of a YAML parser."""

    def __init__(self) -> None:
        self.tree: Any = None
        self._open: list[_Open] = []
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._count = 0
        self._documents = 0

    def take(self, event: Any) -> None:
        """Take the next event.

        Raises:
            BadTree: the tree would break one of the rules above.
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
                    raise BadTree(f"line {line}: a key that is not a string")
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
                raise BadTree(f"line {line}: a key that is not a string")
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


VERSIONS: Final = (
    "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0",
)  # fmt: skip
"""The known versions, oldest first."""

Number: TypeAlias = tuple[int, int, int]


def number_of(version: str) -> Number:
    """Return a version as numbers."""
    major, minor, patch = version.split(".")
    return int(major), int(minor), int(patch)


def text_of(version: Number) -> str:
    """Return a version as text."""
    return ".".join(map(str, version))


class Walk:
    """The state of a walk through a file: the file's name, the position, the versions it needs.

    ``path`` has the names of fields and the indices of lists on the way; ``used`` has, for each
    field of a later version, its place and the versions that added and removed it.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self.path: list[str | int] = []
        self.used: list[tuple[str, Number, Number | None]] = []

    def fail(self, fault: str, *below: str) -> NoReturn:
        """Raise the error for this place, or for one below it."""
        self.path += below
        self.fail_at(self._where(), fault)

    def fail_at(self, where: str, fault: str) -> NoReturn:
        """Raise the error for an earlier place."""
        raise CdiSpecInvalid(
            f"the CDI spec {self._file}",
            found=f"{where}: {fault}" if where else fault,
            do="write it again with the vendor's program, or correct it by the CDI specification",
        )

    def meets(self, since: str, until: str | None = None) -> None:
        """Record that this place needs certain versions."""
        if since != VERSIONS[0]:
            end = None if until is None else number_of(until)
            self.used.append((self._where(), number_of(since), end))

    def _where(self) -> str:
        parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path)
        return "".join(parts).removeprefix(".")


Reader: TypeAlias = Callable[[Any, Walk], Any]


def read_text(value: Any, walk: Walk) -> str:
    """Return a text, even if YAML would read it as a number or boolean."""
    if isinstance(value, bool):
        value = "true" if value else "false"
    if isinstance(value, int):
        value = str(value)
    if not isinstance(value, str):
        walk.fail("it is no string")
    text = str(value)
    if "\0" in text or not _is_encodable(text):
        walk.fail("it has a character that no file name or variable has")
    return text


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_INTEGER: Final = re.compile(r"[+-]?(?:0x[0-9a-fA-F]+|0o?[0-7]+|0|[1-9][0-9]*)", re.ASCII)
_MOST_DIGITS: Final = 24


def integer(below: int, least: int = 0) -> Reader:
    """Return a reader of integers from ``least`` up to, but not including, ``below``."""

    def read(value: Any, walk: Walk) -> int:
        number = value
        if isinstance(value, Plain):
            number = _of_plain(value)
        if isinstance(number, bool) or not isinstance(number, int):
            walk.fail("it is no whole number")
        if not least <= number < below:
            walk.fail(f"{number} is not from {least} to {below - 1}")
        return number

    return read


def _of_plain(text: str) -> int | None:
    """Return a number as YAML writes it: 0660 and 0o660 are octal."""
    if len(text) > _MOST_DIGITS or not _INTEGER.fullmatch(text):
        return None
    if re.fullmatch(r"[+-]?0[0-7]+", text):
        return int(text, 8)
    return int(text, 0)


def read_flag(value: Any, walk: Walk) -> bool:
    """Return a boolean."""
    if isinstance(value, Plain) and value.lower() in {"true", "false"}:
        return value.lower() == "true"
    if not isinstance(value, bool):
        walk.fail("it is not true or false")
    return value


class List:
    """A list whose entries ``item`` reads."""

    def __init__(self, item: Reader) -> None:
        self._item = item

    def __call__(self, value: Any, walk: Walk) -> tuple[Any, ...]:
        """Read a list."""
        if not isinstance(value, list):
            walk.fail("it is not a list")
        made = []
        walk.path.append(0)
        for index, entry in enumerate(value):
            walk.path[-1] = index
            made.append(self._item(entry, walk))
        walk.path.pop()
        return tuple(made)

    def tree(self, value: tuple[Any, ...]) -> list[Any]:
        """Return the tree of this value."""
        return [_tree(self._item, entry) for entry in value]


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an object: its attribute, its reader, and the versions that have it."""

    attribute: str
    read: Reader
    required: bool = False
    since: str = VERSIONS[0]
    until: str | None = None


class Object:
    """An object with these fields, converted by ``make``."""

    def __init__(
        self,
        make: Callable[..., Any],
        table: dict[str, Field],
        check: Callable[[Any, Walk], None] | None = None,
    ) -> None:
        self._make = make
        self._table = table
        self._check = check
        self._folded = {name.lower(): row for name, row in table.items()}
        self._required = tuple(name for name, row in table.items() if row.required)

    def __call__(self, value: Any, walk: Walk) -> Any:
        """Read an object."""
        if not isinstance(value, dict):
            walk.fail("it is not an object")
        given: dict[str, Any] = {}
        walk.path.append("")
        for key, entry in value.items():
            walk.path[-1] = key
            row = self._row(key)
            if row is None:
                walk.fail(f"unknown field; known are {', '.join(self._table)}")
            if row.attribute in given:
                walk.fail("the field is there twice")
            if _is_empty(entry):
                continue
            walk.meets(row.since, row.until)
            given[row.attribute] = row.read(entry, walk)
        walk.path.pop()
        for name in self._required:
            if self._table[name].attribute not in given:
                walk.fail("it is missing", name)
        made = self._make(**given)
        if self._check is not None:
            self._check(made, walk)
        return made

    def _row(self, key: str) -> Field | None:
        """Return the row of a field; its name may be written in any case."""
        return self._table.get(key) or self._folded.get(key.lower())

    def tree(self, value: Any) -> dict[str, Any]:
        """Return the tree of this value, without absent fields."""
        absent = {f.name: f.default for f in fields(value) if f.default is not MISSING}
        made = {}
        for name, row in self._table.items():
            entry = getattr(value, row.attribute)
            shown = _tree(row.read, entry) if entry is not None else None
            if row.required or (entry != absent.get(row.attribute) and not _is_empty(shown)):
                made[name] = shown
        return made


def _tree(reader: Any, value: Any) -> Any:
    tree = getattr(reader, "tree", None)
    return value if tree is None else tree(value)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)
