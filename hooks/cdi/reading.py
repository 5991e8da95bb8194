"""How a tree of JSON or YAML is read by tables of fields.

A reader is a function of a value and the walk that it is met on; it returns what it has made of
the value, or ends the walk with an error that names the place. Readers of lists and objects also
have the way back, ``tree``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

from api.values import defaults_of
from hooks.cdi.errors import CdiSpecInvalid
from hooks.cdi.tree import Plain

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "VERSIONS",
    "Field",
    "List",
    "Number",
    "Object",
    "Walk",
    "integer",
    "number_of",
    "read_flag",
    "read_text",
    "text_of",
]

VERSIONS: Final = (
    "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0",
)  # fmt: skip
"""The versions that are known, the oldest first."""

Number: TypeAlias = tuple[int, int, int]


def number_of(version: str) -> Number:
    """A version as numbers."""
    major, minor, patch = version.split(".")
    return int(major), int(minor), int(patch)


def text_of(version: Number) -> str:
    """A version as it is written."""
    return ".".join(map(str, version))


class Walk:
    """One walk through a file: whose it is, where one is in it, and what needs which version.

    ``path`` has the names of fields and the indices of lists on the way; ``used`` has where each
    field of a later version is, since when there are such, and from when on no more.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self.path: list[str | int] = []
        self.used: list[tuple[str, Number, Number | None]] = []

    def fail(self, fault: str, *below: str) -> NoReturn:
        """Refuse what is here, or below here."""
        self.path += below
        self.fail_at(self._where(), fault)

    def fail_at(self, where: str, fault: str) -> NoReturn:
        """Refuse what is at a place that was met before."""
        raise CdiSpecInvalid(
            f"the CDI spec {self._file}",
            found=f"{where}: {fault}" if where else fault,
            do="have the vendor's program write it anew, or mend it by the CDI specification",
        )

    def meets(self, since: str, until: str | None = None) -> None:
        """Note that here is what only some versions have."""
        if since != VERSIONS[0]:
            end = None if until is None else number_of(until)
            self.used.append((self._where(), number_of(since), end))

    def _where(self) -> str:
        parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path)
        return "".join(parts).removeprefix(".")


if TYPE_CHECKING:
    Reader: TypeAlias = Callable[[Any, Walk], Any]


def read_text(value: Any, walk: Walk) -> str:
    """A text, also where YAML has a number or a truth value."""
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
    """What reads whole numbers from ``least`` up to what is below ``below``."""

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
    """A number as YAML writes it: 0660 and 0o660 are octal."""
    if len(text) > _MOST_DIGITS or not _INTEGER.fullmatch(text):
        return None
    if re.fullmatch(r"[+-]?0[0-7]+", text):
        return int(text, 8)
    return int(text, 0)


def read_flag(value: Any, walk: Walk) -> bool:
    """A truth value."""
    if isinstance(value, Plain) and value.lower() in {"true", "false"}:
        return value.lower() == "true"
    if not isinstance(value, bool):
        walk.fail("it is neither true nor false")
    return value


class List:
    """A list of what ``item`` reads."""

    def __init__(self, item: Reader) -> None:
        self._item = item

    def __call__(self, value: Any, walk: Walk) -> tuple[Any, ...]:
        """Read it."""
        if not isinstance(value, list):
            walk.fail("it is no list")
        made = []
        walk.path.append(0)
        for index, entry in enumerate(value):
            walk.path[-1] = index
            made.append(self._item(entry, walk))
        walk.path.pop()
        return tuple(made)

    def tree(self, value: tuple[Any, ...]) -> list[Any]:
        """What is read as this value."""
        return [_tree(self._item, entry) for entry in value]


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an object: whose attribute it becomes, how it is read, and when there was it."""

    attribute: str
    read: Reader
    required: bool = False
    since: str = VERSIONS[0]
    until: str | None = None


class Object:
    """An object with certain fields, which becomes a value of ``make``."""

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
        """Read it."""
        if not isinstance(value, dict):
            walk.fail("it is no object")
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
        """The row of a field; its name may be written in any case."""
        return self._table.get(key) or self._folded.get(key.lower())

    def tree(self, value: Any) -> dict[str, Any]:
        """What is read as this value, without what is absent."""
        absent = defaults_of(value)
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
