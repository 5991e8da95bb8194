"""A command's output: a table for people, or a document for programs.

A command produces plain values (dicts, lists, strings, numbers, None) and describes once how to
show them in a table. JSON and YAML contain the values themselves, in an object with ``apiVersion``
and ``kind`` (:mod:`integration.cli.kinds`). Their keys are an interface; values are never
abbreviated, coloured or translated. A table fits the terminal, or 80 columns without one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Final, TextIO

from api.errors import NvshimError, printable
from api.values import dataclass
from integration.cli.kinds import API_VERSION, ERROR
from integration.cli.tables import tabulated
from integration.errors import fields_of

Source = str | Callable[[Mapping[str, Any]], Any]

_WIDTH: Final = 80


class Format(StrEnum):
    """The output formats."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"

    @property
    def is_document(self) -> bool:
        """Whether the format is for programs."""
        return self in {Format.JSON, Format.YAML}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str  # in capitals, as in kubectl
    source: Source  # a key of the row, or a function of the row
    show: Callable[[Any], str] | None = None  # formats the value; by default plain()
    right: bool = False  # right-aligned, for numbers
    wide: bool = False  # shown only with ``-o wide``

    def cell(self, row: Mapping[str, Any]) -> str:
        """Return the cell's text in a row."""
        return printable((self.show or plain)(_value(self.source, row)))


class Output:
    """Writes a command's output.

    Args:
        form: the chosen format.
        stream: by default the current stdout.
        kind: the document's kind.
        headers: whether tables have column titles.
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
        """The stream that the output is written to."""
        return self._stream or sys.stdout

    def rows(
        self,
        rows: Sequence[Mapping[str, Any]],
        columns: Sequence[Column],
        *,
        name: Source | None = None,
        **more: Any,
    ) -> None:
        """Show a list: a document with ``items``, or a line per object.

        Args:
            rows: the objects, with all keys for programs.
            columns: the columns of the table.
            name: the object's name for ``-o name``; by default the first column.
            more: further keys of the document.
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
        """Show rows as a table with all of these columns."""
        heads = [[column.title for column in columns]] if self._headers else []
        cells = [[column.cell(row) for column in columns] for row in rows]
        width = None if self.form is Format.WIDE else width_of(self.stream)
        right = [column.right for column in columns]
        lines = tabulated([*heads, *cells], right=right, width=width)
        if heads and is_coloured(self.stream):
            lines[0] = f"\x1b[1m{lines[0]}\x1b[0m"
        self.stream.write("".join(f"{line}\n" for line in lines))

    def text(self, text: str, document: Any) -> None:
        """Show a text, or its document.

        Args:
            text: the text; a final newline is added if missing.
            document: the same information for programs.
        """
        if self.form.is_document:
            self.document(document)
        else:
            self.stream.write(text if text.endswith("\n") else f"{text}\n")

    def document(self, value: Mapping[str, Any]) -> None:
        """Write a value with its kind, as YAML if chosen, else as JSON."""
        self.stream.write(serialized(document_of(self.kind, value), self.form))


def document_of(kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document for programs.

    Args:
        kind: of :mod:`integration.cli.kinds`.
        value: the document's own keys.
    """
    return {"apiVersion": API_VERSION, "kind": kind, **value}


def print_error(error: NvshimError, form: Format) -> None:
    """Print an error to stderr: one line, or a document if the output would be one."""
    if form.is_document:
        sys.stderr.write(serialized(document_of(ERROR, {"error": fields_of(error)}), form))
    else:
        sys.stderr.write(f"{error}\n")


def silence(stream: TextIO) -> None:
    """Redirect a stream to /dev/null, so that the interpreter's final flush cannot fail."""
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), stream.fileno())


@contextmanager
def best_effort(stream: TextIO | None = None) -> Iterator[None]:
    """Drop a message that a stream does not take: the exit status still tells the outcome.

    Args:
        stream: by default stderr.
    """
    try:
        yield
    except OSError:
        silence(stream or sys.stderr)


def _value(source: Source, row: Mapping[str, Any]) -> Any:
    return row.get(source) if isinstance(source, str) else source(row)


def serialized(value: Any, form: Format) -> str:
    """Serialize a value as YAML or JSON."""
    if form is Format.YAML:
        import yaml  # noqa: PLC0415 - slow, and only YAML needs it

        text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
        if not text.replace("\n", "").isprintable():
            text = yaml.safe_dump(value, sort_keys=False)  # escapes everything but ASCII
        return text
    text = json.dumps(value, indent=2, ensure_ascii=False)
    # Unprintable characters occur only in strings; JSON's own syntax is printable.
    return _UNPRINTABLE.sub(_escaped, text) + "\n"


_UNPRINTABLE: Final = re.compile(r"[^\n\x20-\x7e]")


def _escaped(found: re.Match[str]) -> str:
    """Escape a character that could move the cursor or is invalid."""
    return found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1]


def plain(value: Any) -> str:
    """Format a value for a table cell: ``-`` for nothing, a list joined by commas."""
    if value is None or value in ("", []):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ",".join(map(plain, value))
    return str(value)


def counted(count: int, noun: str) -> str:
    """Format a number of things: "1 shim", "2 shims"; the plural adds an s to ``noun``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


_SHORT_ID: Final = 12
_LONG_ID: Final = re.compile(r"[0-9a-f]{32,}")


def short_id(name: str | None) -> str | None:
    """Shorten an engine's long random id; `nvshim explain` accepts the short form.

    Args:
        name: an id, which may also be a chosen name and then stays as it is; None for none.
    """
    return name[:_SHORT_ID] if name and _LONG_ID.fullmatch(name) else name


def title_of(container: Mapping[str, Any]) -> str:
    """Return a container's display name."""
    pod, name = container["pod"], container["name"] or short_id(container["id"])
    if pod is not None:
        return f"{pod['namespace']}/{pod['name']}/{name}"
    return f"{container['namespace']}/{name}"


def by_index(names: Iterable[str], indexes: Iterable[str | None]) -> list[str]:
    """Return the devices' indexes, or UUIDs for devices that the node no longer has.

    Args:
        names: UUIDs.
        indexes: the index of each, or None.
    """
    return [index or name for name, index in zip(names, indexes, strict=True)]


def is_terminal(stream: TextIO) -> bool:
    """Return whether the stream is a terminal that can redraw lines."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def is_coloured(stream: TextIO) -> bool:
    """Return whether the stream may get colours."""
    return is_terminal(stream) and "NO_COLOR" not in os.environ


def width_of(stream: TextIO) -> int:
    """Return the line width in columns: the terminal's, or 80 without one."""
    return shutil.get_terminal_size().columns if is_terminal(stream) else _WIDTH
