"""Format rows as a table of limited width.

Nothing is cut off: a cell that does not fit continues in the next line. Cells are broken after a
space or a comma if possible, else after a slash or an equals sign, else after a dot or a dash, else
anywhere. Right-aligned cells, which are numbers, are never broken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Final

_GAP: Final = "  "
_NARROWEST: Final = 4
_BREAKS: Final = tuple(
    re.compile(rf"[^{ends}]+[{ends}]*|[{ends}]+") for ends in (" ,", " ,/=", " ,/=.-")
)


def tabulated(
    rows: Sequence[Sequence[str]], *, right: Sequence[bool], width: int | None
) -> list[str]:
    """Return the lines of a table.

    Args:
        rows: the cells, row by row; all rows have the same number.
        right: for each column, whether it is right-aligned.
        width: the maximum line length; None for no limit.
    """
    if not rows:
        return []
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if width is not None:
        _narrow(widths, columns, right, width - len(_GAP) * (len(columns) - 1))
    lines = []
    for row in rows:
        cells = [folded(cell, room) for cell, room in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            aligned = (
                part.rjust(room) if is_right else part.ljust(room)
                for part, room, is_right in zip(parts, widths, right, strict=True)
            )
            lines.append(_GAP.join(aligned).rstrip())
    return lines


def _narrow(
    widths: list[int], columns: Sequence[Sequence[str]], right: Sequence[bool], room: int
) -> None:
    """Shrink text columns until they fit, those with the most spare width first."""
    text = [number for number, is_right in enumerate(right) if not is_right]
    found = [{i: _longest(pattern, columns[i]) for i in text} for pattern in _BREAKS]
    for least in (*found, dict.fromkeys(text, _NARROWEST)):
        while sum(widths) > room:
            spare, widest = max(((widths[i] - least[i], i) for i in text), default=(0, 0))
            if spare <= 0:
                break
            widths[widest] -= 1


def _longest(pattern: re.Pattern[str], cells: Sequence[str]) -> int:
    words = (word.rstrip(" ") for cell in cells for word in pattern.findall(cell))
    return max(map(len, words), default=0)


def folded(text: str, width: int) -> list[str]:
    """Break a text into lines."""
    if len(text) <= width:
        return [text]
    lines = [""]
    for word in _BREAKS[0].findall(text):
        if lines[-1] and len(word.rstrip(" ")) > width:
            lines.append("")  # start a long path on a new line
        for part in _parts(word, width, _BREAKS[1:]):
            left = part
            if len(lines[-1]) + len(left.rstrip(" ")) > width:
                lines.append("")
            while len(left.rstrip(" ")) > width:
                lines[-1], left = left[:width], left[width:]
                lines.append("")
            lines[-1] += left
    return [line.rstrip(" ") for line in lines if line.strip(" ")]


def headed(head: str, text: str, width: int, *, indent: int = 0) -> list[str]:
    """Break a text into lines after a head; later lines are aligned with the first.

    Args:
        head: the text before the first line.
        width: the maximum line length.
        indent: another indent for the later lines.
    """
    space = indent or len(head)
    first, *more = folded(text, width - max(space, len(head)))
    return [f"{head}{first}".rstrip(), *(f"{'':<{space}}{line}" for line in more)]


def _parts(text: str, width: int, breaks: Sequence[re.Pattern[str]]) -> Iterator[str]:
    """Split a text into pieces that fit a line, at the best possible breaks."""
    if len(text.rstrip(" ")) <= width or not breaks:
        yield text
        return
    for part in breaks[0].findall(text):
        yield from _parts(part, width, breaks[1:])
