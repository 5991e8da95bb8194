"""Tables and headings of Markdown, from arbitrary text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

__all__ = ["by_reason", "code", "prose", "slug", "table"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells are Markdown, and bars in them are escaped here."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Return text as code, with any quotes in it."""
    fence = "``" if "`" in text else "`"
    space = " " if fence == "``" else ""
    return f"{fence}{space}{text}{space}{fence}" if text else ""


def by_reason(head: str, names: Iterable[tuple[str, str]]) -> str:
    """Return a table of ignored names, with one row for each reason.

    Args:
        head: the title of the column of names.
        names: each name with the reason.
    """
    rows: dict[str, list[str]] = {}
    for name, reason in names:
        rows.setdefault(reason, []).append(code(name))
    return table((head, "why"), [(", ".join(each), reason) for reason, each in rows.items()])


# reStructuredText's roles and literals in docstrings.
_ROLE = re.compile(r":[a-z]+:`~?([^`]+)`")
_LITERAL = re.compile(r"``([^`]+)``")


def prose(text: str) -> str:
    """Return a docstring's text as Markdown: roles and literals become code.

    Args:
        text: any number of lines, which are joined.
    """
    joined = " ".join(text.split())
    return _LITERAL.sub(r"`\1`", _ROLE.sub(r"`\1`", joined)).replace("<", "&lt;")


def slug(heading: str) -> str:
    """Return the anchor of a heading, as Python-Markdown creates it."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    words = re.sub(r"[^\w\s-]", "", plain).strip().lower()
    return re.sub(r"[-\s]+", "-", words)
