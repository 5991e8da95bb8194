"""Adapts pages for mkdocs that are also read in the repository.

- A link that leads out of docs/, to the code, works only in the repository: on the site, only its
  text stays.
- A bar in a table's code is escaped, because it would end the cell on forges. Python-Markdown
  treats it as a part of the code, and would show the backslash.

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
    """Adapt a page; mkdocs calls this for each one."""
    return with_plain_bars(without_links_out(markdown, page.file.src_uri))


def with_plain_bars(markdown: str) -> str:
    """Return a page with unescaped bars in the code of tables."""
    return _ROW.sub(lambda row: _CODE.sub(lambda c: c[0].replace("\\|", "|"), row[0]), markdown)


def without_links_out(markdown: str, name: str) -> str:
    """Return a page without the links that lead out of docs/; ``name`` is its path there."""

    def judged(found: re.Match[str]) -> str:
        target = found[2]
        if ":" in target or target.startswith("#"):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        return found[1] if path.startswith("..") else found[0]

    return _LINK.sub(judged, markdown)
