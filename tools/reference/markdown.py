"""Tables and headings of Markdown, from text that may have anything in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

__all__ = ["by_reason", "code", "prose", "slug", "table"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are Markdown, in which a bar is escaped here."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Text as code, whatever quotes are in it."""
    fence = "``" if "`" in text else "`"
    space = " " if fence == "``" else ""
    return f"{fence}{space}{text}{space}{fence}" if text else ""


def by_reason(head: str, names: Iterable[tuple[str, str]]) -> str:
    """A table of names that mean nothing here, in one row those with the same reason.

    Args:
        head: the title of the column of names.
        names: each with why it means nothing.
    """
    rows: dict[str, list[str]] = {}
    for name, reason in names:
        rows.setdefault(reason, []).append(code(name))
    return table((head, "why"), [(", ".join(each), reason) for reason, each in rows.items()])


# reStructuredText's roles and literals, which docstrings have.
_ROLE = re.compile(r":[a-z]+:`~?([^`]+)`")
_LITERAL = re.compile(r"``([^`]+)``")


def prose(text: str) -> str:
    """Text of a docstring as Markdown: roles become code, and so do literals.

    Args:
        text: of any number of lines, which become one.
    """
    joined = " ".join(text.split())
    return _LITERAL.sub(r"`\1`", _ROLE.sub(r"`\1`", joined)).replace("<", "&lt;")


def slug(heading: str) -> str:
    """The anchor that a heading gets, as Python-Markdown makes it."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    words = re.sub(r"[^\w\s-]", "", plain).strip().lower()
    return re.sub(r"[-\s]+", "-", words)
