"""Tables in documents, which are replaced by what was measured last.

A document says where a table goes with two comments, which nobody sees who reads the document::

    <!-- bench: targets -->
    whatever stands here is replaced
    <!-- bench: end -->
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_PLACE: Final = re.compile(
    r"(?P<begin><!-- bench: (?P<name>[a-z0-9-]+) -->\n).*?(?P<end><!-- bench: end -->)", re.DOTALL
)


def fill(document: str, tables: Mapping[str, str]) -> str:
    """Put tables in their places.

    Args:
        tables: by their names; each ends with a newline.

    Returns:
        The text with the tables; a place whose table is not there keeps what it has.
    """

    def replaced(match: re.Match[str]) -> str:
        table = tables.get(match["name"])
        return match[0] if table is None else f"{match['begin']}\n{table}\n{match['end']}"

    return _PLACE.sub(replaced, document)


def places(document: str) -> list[str]:
    """The names of a document's tables."""
    return [match["name"] for match in _PLACE.finditer(document)]
