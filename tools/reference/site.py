"""What mkdocs is told of pages that are read in the repository as well.

- A link that leads out of docs/, to the code, has a meaning there and none on the site: there its
  text is left.
- A bar in a table's code is escaped for forges, whose tables it would end; Python-Markdown takes it
  for a part of the code, and would show the backslash.

Source: mkdocs' documentation of hooks.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["on_page_markdown", "with_plain_bars", "without_links_out"]

_ROW: Final = re.compile(r"^\|.*$", re.MULTILINE)
_CODE: Final = re.compile(r"`[^`]*`")

_LINK: Final = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Mapping[str, Any]) -> str:
    """Called by mkdocs for each page."""
    return with_plain_bars(without_links_out(markdown, page.file.src_uri))


def with_plain_bars(markdown: str) -> str:
    """A page whose tables have bars in code as they are."""
    return _ROW.sub(lambda row: _CODE.sub(lambda c: c[0].replace("\\|", "|"), row[0]), markdown)


def without_links_out(markdown: str, name: str) -> str:
    """A page without the links that lead out of docs/, below which ``name`` is its path."""

    def judged(found: re.Match[str]) -> str:
        target = found[2]
        if ":" in target or target.startswith("#"):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        return found[1] if path.startswith("..") else found[0]

    return _LINK.sub(judged, markdown)
