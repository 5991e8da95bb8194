"""One answer, as a table for people or as a document for programs.

A command makes plain values (dicts, lists, strings, numbers, None) and says once how a person
wants to see them. JSON and YAML show the values themselves, in an object with ``apiVersion`` and
``kind`` (:mod:`integration.cli.kinds`): their keys are an interface, and are never abbreviated,
coloured or translated. A table fits the terminal, or 80 columns where there is none.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TextIO

from api.errors import NvshimError, printable
from integration.cli.kinds import API_VERSION, ERROR
from integration.cli.tables import tabulated
from integration.errors import fields_of

if TYPE_CHECKING:
    Source = str | Callable[[Mapping[str, Any]], Any]

_WIDTH: Final = 80


class Format(StrEnum):
    """How an answer is written."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"

    @property
    def is_document(self) -> bool:
        """Whether it is for programs."""
        return self in {Format.JSON, Format.YAML}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str  # its head, in capitals as kubectl's
    source: Source  # the key of the row's value, or what makes the cell's value of the whole row
    show: Callable[[Any], str] | None = None  # makes the cell's text of the value; by default plain
    right: bool = False  # numbers stand right
    wide: bool = False  # it is shown with ``-o wide`` only

    def cell(self, row: Mapping[str, Any]) -> str:
        """The text of its cell in a row."""
        return printable((self.show or plain)(_value(self.source, row)))


class Output:
    """Where a command's answer goes.

    Args:
        form: the form that was asked for.
        stream: by default stdout as it is when something is shown.
        kind: of the document.
        headers: whether tables have a line with the columns' titles.
    """

    def __init__(
        self,
        form: Format,
        stream: TextIO | None = None,
        *,
        kind: str = "Answer",
        headers: bool = True,
    ) -> None:
        self.form = form
        self.kind = kind
        self._stream = stream
        self._headers = headers

    @property
    def stream(self) -> TextIO:
        """What the answer is written to."""
        return self._stream or sys.stdout

    def rows(
        self,
        rows: Sequence[Mapping[str, Any]],
        columns: Sequence[Column],
        *,
        name: Source | None = None,
        **more: Any,
    ) -> None:
        """Show many things of a kind: a document with ``items``, or a line for each.

        Args:
            rows: the objects, with all keys that a program may want.
            columns: what of them a person sees.
            name: what each is called by other commands; by default what the first column says.
            more: what else the document has.
        """
        if self.form.is_document:
            self.document({"items": [dict(row) for row in rows], **more})
        elif self.form is Format.NAME:
            source = columns[0].source if name is None else name
            lines = (printable(plain(_value(source, row))) for row in rows)
            self.stream.write("".join(f"{line}\n" for line in lines))
        else:
            self.table(rows, [c for c in columns if not c.wide or self.form is Format.WIDE])

    def table(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> None:
        """Show rows as a table, with all of these columns."""
        heads = [[column.title for column in columns]] if self._headers else []
        cells = [[column.cell(row) for column in columns] for row in rows]
        width = None if self.form is Format.WIDE else width_of(self.stream)
        right = [column.right for column in columns]
        lines = tabulated([*heads, *cells], right=right, width=width)
        if heads and is_coloured(self.stream):
            lines[0] = f"\x1b[1m{lines[0]}\x1b[0m"
        self.stream.write("".join(f"{line}\n" for line in lines))

    def text(self, text: str, document: Any) -> None:
        """Show prose that has a document behind it.

        Args:
            text: for a person; its end of line is added.
            document: for a program.
        """
        if self.form.is_document:
            self.document(document)
        else:
            self.stream.write(text if text.endswith("\n") else f"{text}\n")

    def document(self, value: Mapping[str, Any]) -> None:
        """Write a value as JSON, or as YAML if that was asked for, with its kind."""
        self.stream.write(serialized(document_of(self.kind, value), self.form))


def document_of(kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """A value as programs get it.

    Args:
        kind: of :mod:`integration.cli.kinds`.
        value: its own keys.
    """
    return {"apiVersion": API_VERSION, "kind": kind, **value}


def tell_error(error: NvshimError, form: Format) -> None:
    """Say on stderr what failed: in a line, or as the document that the answer was to be."""
    if form.is_document:
        sys.stderr.write(serialized(document_of(ERROR, {"error": fields_of(error)}), form))
    else:
        sys.stderr.write(f"{error}\n")


def _value(source: Source, row: Mapping[str, Any]) -> Any:
    return row.get(source) if isinstance(source, str) else source(row)


def serialized(value: Any, form: Format) -> str:
    """A value as text."""
    if form is Format.YAML:
        import yaml  # noqa: PLC0415 - only who asks for it pays for it

        text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
        if not text.replace("\n", "").isprintable():
            text = yaml.safe_dump(value, sort_keys=False)  # escaped, all that is not ASCII
        return text
    text = json.dumps(value, indent=2, ensure_ascii=False)
    # In strings alone: what JSON itself is written with is printable.
    return _UNPRINTABLE.sub(_escaped, text) + "\n"


_UNPRINTABLE: Final = re.compile(r"[^\n\x20-\x7e]")


def _escaped(found: re.Match[str]) -> str:
    """A character as JSON writes one that moves a cursor, or is none at all."""
    return found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1]


def plain(value: Any) -> str:
    """A value as a cell of a table: nothing is ``-``, a list is joined by commas."""
    if value is None or value in ("", []):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ",".join(map(plain, value))
    return str(value)


def counted(count: int, noun: str) -> str:
    """How many there are of something: "1 shim", "2 shims".

    Args:
        count: how many.
        noun: of one; its plural has an s.
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


_SHORT_ID: Final = 12
_LONG_ID: Final = re.compile(r"[0-9a-f]{32,}")


def short_id(name: str | None) -> str | None:
    """As much of an engine's long random id as tells it from others; `nvshim explain` takes that.

    Args:
        name: an id, which may be a word of somebody's; None for none.
    """
    return name[:_SHORT_ID] if name and _LONG_ID.fullmatch(name) else name


def title_of(container: Mapping[str, Any]) -> str:
    """What people call a container of an answer."""
    pod, name = container["pod"], container["name"] or short_id(container["id"])
    if pod is not None:
        return f"{pod['namespace']}/{pod['name']}/{name}"
    return f"{container['namespace']}/{name}"


def by_index(names: Iterable[str], indexes: Iterable[str | None]) -> list[str]:
    """Devices as people call them, by their index where the node has them.

    Args:
        names: UUIDs.
        indexes: of each, or None.
    """
    return [index or name for name, index in zip(names, indexes, strict=True)]


def is_terminal(stream: TextIO) -> bool:
    """Whether a person looks at it, with colours or without."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def is_coloured(stream: TextIO) -> bool:
    """Whether what is written there may be coloured."""
    return is_terminal(stream) and "NO_COLOR" not in os.environ


def width_of(stream: TextIO) -> int:
    """How many columns a line has there: the terminal's, or 80 where there is none."""
    return shutil.get_terminal_size().columns if is_terminal(stream) else _WIDTH
