"""Edit members of a JSON file as text, leaving everything else unchanged.

Rules
- Only the member changes. Order, indentation and blank lines are preserved byte for byte.
- A new member is formatted like its neighbours: on its own line if theirs are, with their
  indentation.
- The caller has already parsed the text with :mod:`json`; its outermost value is an object.

Source: RFC 8259.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from json.decoder import JSONDecodeError
from typing import Any, Final

MARK: Final = "\ufeff"
"""The byte order mark of some editors, which dockerd accepts."""

_SPACE: Final = f" \t\r\n{MARK}"
_INDENTATION: Final = "    "
_DECODER: Final = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class _Member:
    """A member of an object: the offsets of its name, and of its value's start and end."""

    name: str
    start: int
    value: int
    end: int


@dataclass(frozen=True, slots=True)
class _Object:
    """An object: the offsets of its braces, and its members."""

    begin: int
    end: int
    members: tuple[_Member, ...]

    def member(self, name: str) -> _Member | None:
        """Return the last member of that name; parsers use the last one."""
        return next((m for m in reversed(self.members) if m.name == name), None)


def set_member(text: str, path: Sequence[str], value: Any) -> str:
    """Set a member's value; missing objects on the path are created.

    Raises:
        ValueError: something on the path is not an object.
    """
    at = _skip(text, 0)
    for depth, name in enumerate(path):
        there = _object(text, at)
        member = there.member(name)
        rest = path[depth + 1 :]
        if member is None:
            for missing in reversed(rest):
                value = {missing: value}
            return _inserted(text, there, name, value)
        if not rest:
            indentation = _indentation(text, member.start)
            new = _written(value, indentation, _unit(text), _ending(text))
            return text[: member.value] + new + text[member.end :]
        at = member.value
    return text


def remove_member(text: str, path: Sequence[str]) -> str:
    """Remove a member; do nothing if it is missing."""
    at = _skip(text, 0)
    for name in path[:-1]:
        member = _object(text, at).member(name)
        if member is None or text[member.value] != "{":
            return text
        at = member.value
    there = _object(text, at)
    member = there.member(path[-1])
    if member is None:
        return text
    position = there.members.index(member)
    if len(there.members) == 1:
        return f"{text[: there.begin]}{{}}{text[there.end :]}"
    if position:
        return text[: there.members[position - 1].end] + text[member.end :]
    return text[: member.start] + text[there.members[1].start :]


def _inserted(text: str, there: _Object, name: str, value: Any) -> str:
    ending, unit = _ending(text), _unit(text)
    if there.members:
        last = there.members[-1]
        if "\n" not in text[there.begin : last.start]:
            # Compact, like the others.
            new = f", {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}"
            return text[: last.end] + new + text[last.end :]
        indentation = _indentation(text, last.start)
        new = f"{json.dumps(name)}: {_written(value, indentation, unit, ending)}"
        return f"{text[: last.end]},{ending}{indentation}{new}{text[last.end :]}"
    outer = _indentation(text, there.begin)
    indentation = outer + unit
    new = f"{json.dumps(name)}: {_written(value, indentation, unit, ending)}"
    inside = f"{{{ending}{indentation}{new}{ending}{outer}}}"
    return text[: there.begin] + inside + text[there.end :]


def _written(value: Any, indentation: str, unit: str, ending: str) -> str:
    lines = json.dumps(value, indent=unit, ensure_ascii=False).split("\n")
    return (ending + indentation).join(lines)


def _object(text: str, at: int) -> _Object:
    if text[at] != "{":
        raise ValueError("not an object")
    members = []
    begin, at = at, _skip(text, at + 1)
    while text[at] != "}":
        start = at
        name, at = _decode(text, at)
        value = _skip(text, _skip(text, at) + 1)  # after the colon
        _, end = _decode(text, value)
        members.append(_Member(name, start, value, end))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return _Object(begin, at + 1, tuple(members))


def _decode(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except JSONDecodeError as error:  # the caller has parsed it, so this is a bug
        raise ValueError(str(error)) from error


def _unit(text: str) -> str:
    """Return the indentation of the outermost object's members."""
    members = _object(text, _skip(text, 0)).members
    found = _indentation(text, members[0].start) if members else ""
    return found if found and "\n" in text[: members[0].start] else _INDENTATION


def _indentation(text: str, at: int) -> str:
    """Return the indentation of the line at an offset."""
    begin = text.rfind("\n", 0, at) + 1
    line = text[begin:]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _ending(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at
