"""One answer, as a table for people or as a document for programs.

A command makes plain values (dicts, lists, strings, numbers, None) and says once how a person
wants to see them. JSON and YAML show the values themselves: their keys are an interface, and
are never abbreviated, coloured or translated.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TextIO

from api.errors import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = [
    "Column", "Format", "Output", "counted", "is_terminal", "plain", "serialized", "title_of",
]  # fmt: skip

# A table that nobody looks at is for awk: a line per row, however long.
_NO_WIDTH: Final = 100_000


class Format(StrEnum):
    """How an answer is written."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: its head, in capitals as kubectl's.
        key: of the row's value in the document.
        show: makes the cell's text of the value; by default :func:`plain`.
        right: numbers stand right.
    """

    title: str
    key: str
    show: Callable[[Any], str] | None = None
    right: bool = False


class Output:
    """Where a command's answer goes.

    Args:
        form: the form that was asked for.
        stream: by default stdout as it is when something is shown.
    """

    def __init__(self, form: Format, stream: TextIO | None = None) -> None:
        self.form = form
        self._stream = stream

    @property
    def stream(self) -> TextIO:
        """What the answer is written to."""
        return self._stream or sys.stdout

    def rows(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> None:
        """Show many things of a kind: a list of objects, or a table with a line for each.

        Args:
            rows: the objects, with all keys that a program may want.
            columns: what of them a person sees.
        """
        if self.form is not Format.TABLE:
            self.document([dict(row) for row in rows])
            return
        from rich.table import Table  # noqa: PLC0415 - 40 ms that no script pays

        table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
        cells = [[printable((c.show or plain)(row.get(c.key))) for c in columns] for row in rows]
        for number, column in enumerate(columns):
            justify: Any = "right" if column.right else "left"
            # What is of one word is to stay so, where another column has room to give.
            of_words = any(" " in row[number] for row in cells)
            no_wrap = not of_words or not is_terminal(self.stream)
            table.add_column(column.title, justify=justify, no_wrap=no_wrap, overflow="fold")
        for row in cells:
            table.add_row(*row)
        self._print(table)

    def facts(self, facts: Mapping[str, Any], titles: Mapping[str, str]) -> None:
        """Show one thing: an object, or a line for each of its facts.

        Args:
            facts: the object, with all keys that a program may want.
            titles: what of it a person sees, and by which name, in this order.
        """
        if self.form is not Format.TABLE:
            self.document(dict(facts))
            return
        from rich.table import Table  # noqa: PLC0415 - 40 ms that no script pays

        table = Table(box=None, pad_edge=False, show_edge=False, show_header=False)
        table.add_column(no_wrap=True, style="bold")
        table.add_column(no_wrap=not is_terminal(self.stream), overflow="fold")
        for key, title in titles.items():
            table.add_row(title, printable(plain(facts.get(key))))
        self._print(table)

    def text(self, text: str, document: Any) -> None:
        """Show prose that has a document behind it.

        Args:
            text: for a person; its end of line is added.
            document: for a program.
        """
        if self.form is Format.TABLE:
            self.stream.write(text if text.endswith("\n") else f"{text}\n")
        else:
            self.document(document)

    def document(self, value: Any) -> None:
        """Write a value as JSON, or as YAML if that was asked for.

        Args:
            value: of what JSON knows.
        """
        self.stream.write(serialized(value, self.form))

    def _print(self, table: Any) -> None:
        from rich.console import Console  # noqa: PLC0415 - see above

        plain_text: Any = {"highlight": False, "markup": False, "emoji": False}
        console = Console(file=self.stream, width=_NO_WIDTH, **plain_text)
        if is_terminal(self.stream):
            person = Console(file=self.stream, **plain_text)
            # A UUID that is cut is of no use: rather a line that the terminal breaks.
            if console.measure(table).minimum <= person.width:
                console = person
        with console.capture() as captured:
            console.print(table)
        lines = captured.get().splitlines()
        self.stream.write("".join(f"{line.rstrip()}\n" for line in lines))


def serialized(value: Any, form: Format) -> str:
    """A value as text.

    Args:
        value: of what JSON knows.
        form: YAML, or anything else for JSON.
    """
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
        return _joined(value)
    return str(value)


def counted(count: int, noun: str) -> str:
    """How many there are of something: "1 shim", "2 shims".

    Args:
        count: how many.
        noun: of one; its plural has an s.
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def title_of(container: Mapping[str, Any]) -> str:
    """What people call a container of an answer.

    Args:
        container: as answers have it.
    """
    pod = container["pod"]
    if pod is not None:
        return f"{pod['namespace']}/{pod['name']}/{container['name'] or container['id']}"
    return f"{container['namespace']}/{container['name'] or container['id']}"


def _joined(values: Iterable[Any]) -> str:
    return ",".join(plain(value) for value in values)


def is_terminal(stream: TextIO) -> bool:
    """Whether a person looks at it, with colours or without.

    Args:
        stream: stdout or stderr.
    """
    return stream.isatty() and os.environ.get("TERM") != "dumb"
