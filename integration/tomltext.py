"""Edit a TOML file as text, between its statements.

Rules
- Only the edit changes: comments, order, quotes, blank lines and line endings stay, byte for byte.
  Parsing and writing a document would not keep them.
- A ``text`` is a whole document, and valid TOML: the caller has parsed it with :mod:`tomllib`, and
  parses the result of an edit again.

Source: TOML 1.0.0.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

_SPACE: Final = " \t"
_LINE_END: Final = "\r\n"
_MARK: Final = "\ufeff"  # some editors write it before UTF-8, and containerd 1 accepts it


class Kind(Enum):
    """The kind of a statement."""

    TABLE = "[a]"
    ARRAY = "[[a]]"
    KEY = "a = 1"


@dataclass(frozen=True, slots=True)
class Statement:
    """A header or a key with its value."""

    kind: Kind
    table: tuple[str, ...]  # the table that it opens or belongs to
    key: tuple[str, ...]  # the parts of a key (two for ``a.b = 1``); () for a header
    start: int  # its offset, after the indentation
    value: tuple[int, int]  # start and end of the value, or of the header
    comment: str  # the comment after it, with its ``#``, without the line ending
    end: int  # the start of the next line, or the end of the text

    @property
    def path(self) -> tuple[str, ...]:
        """The path of the key or table from the root."""
        return (*self.table, *self.key)


def parse(text: str) -> dict[str, Any]:
    """Parse a document.

    Args:
        text: the document, with or without a byte order mark.

    Raises:
        TOMLDecodeError: it is not valid TOML, or nested too deeply.
    """
    try:
        return tomllib.loads(text.removeprefix(_MARK))
    except RecursionError as error:
        raise tomllib.TOMLDecodeError("it is nested too deeply") from error


def statements(text: str) -> Iterator[Statement]:
    """Yield the statements of a document, in order."""
    at = len(_MARK) if text.startswith(_MARK) else 0
    table: tuple[str, ...] = ()
    while True:
        at = _skip(text, at, _SPACE + _LINE_END)
        if at >= len(text):
            return
        if text[at] == "#":
            at = _line_end(text, at)
            continue
        start = at
        if text[at] == "[":
            kind = Kind.ARRAY if text.startswith("[[", at) else Kind.TABLE
            brackets = 2 if kind is Kind.ARRAY else 1
            stop = _find(text, at + brackets, "]")
            table = _keys(text[at + brackets : stop])
            key: tuple[str, ...] = ()
            value = (start, stop + brackets)
        else:
            kind = Kind.KEY
            equals = _find(text, at, "=")
            key = _keys(text[at:equals])
            first = _skip(text, equals + 1, _SPACE)
            value = (first, _value_end(text, first))
        stop = _line_end(text, value[1])
        comment = text[_skip(text, value[1], _SPACE) : stop]
        at = _next_line(text, stop)
        yield Statement(kind, table, key, start, value, comment, at)


def elements(text: str, array: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the start and the end of each element of an array.

    Args:
        array: the start and the end of the array, including its brackets.
    """
    found: list[tuple[int, int]] = []
    at, stop = array[0] + 1, array[1] - 1
    while True:
        at = _skip(text, at, _SPACE + _LINE_END + ",")
        if at >= stop:
            return found
        if text[at] == "#":
            at = _line_end(text, at)
            continue
        end = _value_end(text, at, stop=",]")
        found.append((at, end))
        at = end


def insert_element(text: str, array: tuple[int, int], value: str) -> str:
    """Add a string to an array; commas and comments after the last element stay there.

    Args:
        array: see :func:`elements`.
        value: the string.
    """
    there = elements(text, array)
    at = there[-1][1] if there else array[0] + 1
    return text[:at] + (", " if there else "") + to_value(value) + text[at:]


def remove_element(text: str, array: tuple[int, int], is_meant: Callable[[Any], bool]) -> str:
    """Remove values from an array, in any notation; comments stay.

    Args:
        array: see :func:`elements`.
        is_meant: returns whether to remove a value.
    """
    there = elements(text, array)
    for position in reversed(range(len(there))):
        first, end = there[position]
        if not is_meant(tomllib.loads(f"a = {text[first:end]}")["a"]):
            continue
        before = there[position - 1][1] if position else first
        after = there[1][0] if not position and len(there) > 1 else end
        is_alone = (before, after) == (first, end)
        if is_alone or "#" in text[before:first] + text[end:after]:
            # A comment next to it stays; only the comma after it and an empty line are removed.
            comma = _skip_comments(text, end)
            if text[comma] == ",":
                text = text[:comma] + text[comma + 1 :]
                array = array[0], array[1] - 1
            before, after = text.rfind("\n", 0, first) + 1, _next_line(text, _line_end(text, end))
            if text[before:first].strip() or text[end:after].strip():
                before, after = first, end
        text = text[:before] + text[after:]
        array = array[0], array[1] - (after - before)
        there = elements(text, array)
    return text


def insert_line(text: str, at: int, line: str) -> str:
    """Insert a line.

    If the last line has no line ending, a line that is added after it has none either.

    Args:
        at: the start of a line, or the end of the text.
        line: without its line ending.
    """
    ending = line_ending(text)
    if at == len(text) and not _is_ended(text):
        return text + ending + line
    return text[:at] + line + ending + text[at:]


def set_value(text: str, table: tuple[str, ...], key: str, value: Any) -> str | None:
    """Set a key's value; add the key if its table exists.

    Args:
        table: the key's table; () for the root.
        key: the last part of its path.
        value: a value that :func:`to_value` can write.

    Returns:
        The new text; None if the key and its table's header are missing.
    """
    place, margin = None, ""
    for statement in statements(text):
        before = text[text.rfind("\n", 0, statement.start) + 1 : statement.start].lstrip(_MARK)
        if place is None and not table:  # before the first table
            place = statement.start - len(before)
        if statement.kind is Kind.KEY and statement.path == (*table, key):
            old = statement.value
            return text[: old[0]] + to_value(value) + text[old[1] :]
        if statement.kind is Kind.TABLE and statement.table == table:
            place, margin = statement.end, f"{before}  "
        elif statement.kind is Kind.KEY and statement.table == table and place is not None:
            place, margin = statement.end, before
    if place is None and table:
        return None
    place = len(text) if place is None else place
    return insert_line(text, place, f"{margin}{to_key(key)} = {to_value(value)}")


def with_value(text: str, table: tuple[str, ...], key: str, value: Any) -> str:
    """Like :func:`set_value`, but add a missing table at the end."""
    changed = set_value(text, table, key, value)
    if changed is not None:
        return changed
    gap = "\n" if text else ""
    made = append(text, f"{gap}[{to_key(*table)}]\n{to_key(key)} = {to_value(value)}")
    return made if _is_ended(made) else made + line_ending(made)


def cut(text: str, path: tuple[str, ...], note: str = "") -> str:
    """Remove a table with its content.

    Args:
        path: the path of the table.
        note: a comment to leave in its place; "" for none.
    """
    runs: list[tuple[int, int]] = []
    is_last = False
    for statement in statements(text):
        is_meant = statement.path[: len(path)] == path
        first = text.rfind("\n", 0, statement.start) + 1
        if is_meant and is_last:
            runs[-1] = runs[-1][0], statement.end
        elif is_meant:
            runs.append((first, statement.end))
        is_last = is_meant
    for first, end in reversed(runs):
        ending = text[len(text[:end].rstrip(_LINE_END)) : end]
        text = text[:first] + (f"# {note}{ending}" if note else "") + text[end:]
    return text


def append(text: str, lines: str) -> str:
    r"""Append lines; see :func:`insert_line`.

    Args:
        lines: with ``\n`` between them and none at the end.
    """
    return insert_line(text, len(text), lines.replace("\n", line_ending(text)))


def line_ending(text: str) -> str:
    """Return the line ending of a document."""
    return "\r\n" if "\r\n" in text else "\n"


def to_value(value: Any) -> str:
    """Write a string (without surrogates), boolean, number, or list of these as TOML."""
    # TOML's basic strings have JSON's escapes, except for DEL, which JSON does not escape.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def to_key(*path: str) -> str:
    """Write a dotted key; quote the parts that cannot be bare keys."""
    return ".".join(
        part if part and part.replace("_", "").replace("-", "").isalnum() and part.isascii()
        else to_value(part)
        for part in path
    )  # fmt: skip


def _keys(dotted: str) -> tuple[str, ...]:
    found: Any = tomllib.loads(f"{dotted.strip(_SPACE)} = 0")
    path = []
    while isinstance(found, dict):
        ((key, found),) = found.items()
        path.append(key)
    return tuple(path)


def _value_end(text: str, at: int, stop: str = "") -> int:
    """Return the end of the value at an offset."""
    if text[at] in "\"'":
        return _string_end(text, at)
    if text[at] not in "[{":
        end = at
        while end < len(text) and text[end] not in f"#{_LINE_END}{stop}":
            end += 1
        while text[end - 1] in _SPACE:
            end -= 1
        return end
    depth = 0
    while True:
        character = text[at]
        if character in "\"'":
            at = _string_end(text, at)
            continue
        if character == "#":
            at = _line_end(text, at)
            continue
        depth += (character in "[{") - (character in "]}")
        at += 1
        if not depth:
            return at


def _string_end(text: str, at: int) -> int:
    quote = text[at]
    escapes = quote == '"'
    if not text.startswith(quote * 3, at):
        at += 1
        while text[at] != quote:
            at += 2 if escapes and text[at] == "\\" else 1
        return at + 1
    at += 3
    while not text.startswith(quote * 3, at):
        at += 2 if escapes and text[at] == "\\" else 1
    at += 3
    # Up to two quotes before the closing ones are part of the string.
    for _ in range(2):
        at += text.startswith(quote, at)
    return at


def _find(text: str, at: int, character: str) -> int:
    while text[at] != character:
        at = _string_end(text, at) if text[at] in "\"'" else at + 1
    return at


def _skip(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at


def _skip_comments(text: str, at: int) -> int:
    """Return the offset after spaces, line endings and comments."""
    while text[at := _skip(text, at, _SPACE + _LINE_END)] == "#":
        at = _line_end(text, at)
    return at


def _line_end(text: str, at: int) -> int:
    """Return the end of a line, before its line ending."""
    end = text.find("\n", at)
    if end < 0:
        return len(text)
    return end - (end > at and text[end - 1] == "\r")


def _next_line(text: str, at: int) -> int:
    """Return the offset after a line ending."""
    if text.startswith("\r\n", at):
        return at + 2
    return at + text.startswith("\n", at)


def _is_ended(text: str) -> bool:
    """Return whether the text is empty or ends with a line ending."""
    return not text or text.endswith("\n")
