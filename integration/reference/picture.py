"""A picture (SVG) of a flow, drawn from a text that Mermaid understands as well.

The text, with one statement to a line::

    flowchart TD
    %% a comment
    title: what it shows            (after %%, so that Mermaid passes over it)
    a["containerd"]                 a box; <br> breaks a line of its text
    d[("nvidia.json")]              a file
    r(["the container"])            what runs
    a -->|ttrpc| b                  an arrow with a word; the words may be left out
    c -.-> b                        what is read: it does not move a box down

Rules
- A box stands below all boxes that an arrow leads from to it; boxes of a row stand in the
  order of the text, and each row in the middle.
- Arrows are straight, from edge to edge. One that would cross a box is an error: the text
  has to be ordered otherwise, since nobody would see what is meant.
- The picture has no background and no font of its own, and is legible in light and in dark.

Source: Mermaid's flowchart syntax; SVG 2; CSS Media Queries 5.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Final

from integration.reference.errors import PictureMalformed

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Arrow", "Box", "Flow", "draw", "read_flow"]

_STYLE: Final = """\
text{font:13px system-ui,sans-serif;fill:#24292f;text-anchor:middle}
.word{font-size:11.5px;fill:#57606a}
.box{fill:#f6f8fa;stroke:#57606a}.file{fill:#fff8e5;stroke:#9a6700}.runs{fill:#e6f4ea;stroke:#1a7f37}
.arrow{stroke:#57606a;stroke-width:1.4;fill:none}.dashed{stroke-dasharray:5 4}.head{fill:#57606a}
@media(prefers-color-scheme:dark){
text{fill:#e6edf3}.word{fill:#9da7b3}
.box{fill:#161b22;stroke:#9da7b3}.file{fill:#2b2411;stroke:#d4a72c}.runs{fill:#12261b;stroke:#3fb950}
.arrow{stroke:#9da7b3}.head{fill:#9da7b3}
}
"""

_CHARACTER: Final = 7.1  # about how wide one is
_LINE: Final = 17.0
_PADDING: Final = 11.0
_BETWEEN: Final = 46.0  # boxes of a row
_ROWS: Final = 52.0  # between rows
_MARGIN: Final = 8.0


@dataclass(slots=True)
class Box:
    """A box.

    Attributes:
        name: in the text.
        lines: what stands in it.
        kind: of the style: box, file, runs.
        row: counted from the top.
        x: of its middle, in pixels.
        y: of its upper edge.
    """

    name: str
    lines: list[str]
    kind: str
    row: int = 0
    x: float = 0.0
    y: float = 0.0

    @property
    def width(self) -> float:
        """In pixels."""
        return max(len(line) for line in self.lines) * _CHARACTER + 2 * _PADDING

    @property
    def height(self) -> float:
        """In pixels."""
        return len(self.lines) * _LINE + 2 * _PADDING - 6


@dataclass(frozen=True, slots=True)
class Arrow:
    """An arrow between two boxes.

    Attributes:
        start: the name of the box it comes from.
        end: the name of the other.
        word: what stands beside it.
        dashed: whether it is one that moves no box.
    """

    start: str
    end: str
    word: str
    dashed: bool


@dataclass(slots=True)
class Flow:
    """What a text says.

    Attributes:
        title: what the picture shows, for those who cannot see it.
        boxes: by name, in the text's order.
        arrows: in the text's order.
    """

    title: str = ""
    boxes: dict[str, Box] = field(default_factory=dict)
    arrows: list[Arrow] = field(default_factory=list)


_BOX: Final = re.compile(r'(\w+)(\[\("|\(\["|\[")(.+?)(?:"\)\]|"\]\)|"\])')
_KINDS: Final = {'[("': "file", '(["': "runs", '["': "box"}
_ARROW: Final = re.compile(r"(\w+)\s+(-->|-\.->)(?:\|([^|]+)\|)?\s+(\w+)")


def read_flow(text: str) -> Flow:
    """Read a picture's text.

    Args:
        text: as the head of this module describes it.

    Raises:
        PictureMalformed: a line of it is not understood, or names a box that is not there.
    """
    flow = Flow()
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if line.startswith("%% title:"):
            flow.title = line.partition(":")[2].strip()
        elif not line or line.startswith("%%") or line == "flowchart TD":
            continue
        elif found := _ARROW.fullmatch(line):
            start, kind, word, end = found.groups()
            flow.arrows.append(Arrow(start, end, word or "", dashed=kind == "-.->"))
        elif found := _BOX.fullmatch(line):
            name, opening, content = found.groups()
            flow.boxes[name] = Box(name, re.split(r"<br/?>", content), _KINDS[opening])
        else:
            raise _malformed(f"line {number}: {line}", "write a box or an arrow")
    for arrow in flow.arrows:
        for name in (arrow.start, arrow.end):
            if name not in flow.boxes:
                raise _malformed(f"an arrow at {name}, which is no box", "declare the box")
    return flow


def _malformed(found: str, do: str) -> PictureMalformed:
    return PictureMalformed("draw a picture", found=found, do=do)


def draw(text: str) -> str:
    """Draw a picture's text.

    Args:
        text: as the head of this module describes it.

    Returns:
        The SVG.

    Raises:
        PictureMalformed: it is not understood, has a circle of arrows, or an arrow crosses a box.
    """
    flow = read_flow(text)
    _place_rows(flow)
    width, height = _place(flow)
    shapes = [*_arrows(flow), *_boxes(flow)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img">\n'
        f"<title>{escape(flow.title)}</title>\n<style>\n{_STYLE}</style>\n"
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto-start-reverse"><path class="head" d="M0 0L8 4L0 8z"/>'
        "</marker></defs>\n" + "\n".join(shapes) + "\n</svg>\n"
    )


def _place_rows(flow: Flow) -> None:
    firm = [arrow for arrow in flow.arrows if not arrow.dashed]
    for _ in range(len(flow.boxes)):
        moved = False
        for arrow in firm:
            below = flow.boxes[arrow.start].row + 1
            if flow.boxes[arrow.end].row < below:
                flow.boxes[arrow.end].row = below
                moved = True
        if not moved:
            break
    else:
        raise _malformed("arrows in a circle", "dash the one that leads back")
    # Then as far down as what they lead to allows, so that a source stands beside its use.
    for _ in flow.boxes:
        for box in flow.boxes.values():
            next_rows = [flow.boxes[arrow.end].row for arrow in firm if arrow.start == box.name]
            if next_rows:
                box.row = max(box.row, min(next_rows) - 1)


def _place(flow: Flow) -> tuple[float, float]:
    rows: dict[int, list[Box]] = {}
    for box in flow.boxes.values():
        rows.setdefault(box.row, []).append(box)
    widths = {n: sum(b.width for b in row) + _BETWEEN * (len(row) - 1) for n, row in rows.items()}
    width = max(widths.values()) + 2 * _MARGIN
    y = _MARGIN
    for number in sorted(rows):
        x = (width - widths[number]) / 2
        for box in rows[number]:
            box.x, box.y = x + box.width / 2, y
            x += box.width + _BETWEEN
        y += max(box.height for box in rows[number]) + _ROWS
    return round(width), round(y - _ROWS + _MARGIN)


def _boxes(flow: Flow) -> Iterator[str]:
    for box in flow.boxes.values():
        radius = box.height / 2 if box.kind == "runs" else 4
        yield (
            f'<rect class="{box.kind}" x="{box.x - box.width / 2:.1f}" y="{box.y:.1f}" '
            f'width="{box.width:.1f}" height="{box.height:.1f}" rx="{radius:g}"/>'
        )
        for number, line in enumerate(box.lines):
            y = box.y + _PADDING + 9 + number * _LINE
            yield f'<text x="{box.x:.1f}" y="{y:.1f}">{escape(line)}</text>'


def _arrows(flow: Flow) -> Iterator[str]:
    for arrow in flow.arrows:
        start, end = flow.boxes[arrow.start], flow.boxes[arrow.end]
        (x1, y1), (x2, y2) = _ends(start, end)
        for box in flow.boxes.values():
            if box not in (start, end) and _crosses(box, (x1, y1), (x2, y2)):
                raise _malformed(
                    f"the arrow {arrow.start} to {arrow.end} crosses {box.name}",
                    "order the boxes otherwise",
                )
        dashed = " dashed" if arrow.dashed else ""
        yield (
            f'<line class="arrow{dashed}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" '
            f'y2="{y2:.1f}" marker-end="url(#head)"/>'
        )
        if arrow.word:
            # Beside the line, as far off as half the word is wide that way.
            x, y, length = (x1 + x2) / 2, (y1 + y2) / 2, math.hypot(x2 - x1, y2 - y1)
            across, up = abs(y2 - y1) / length, abs(x2 - x1) / length
            sign = 1 if x2 >= x1 else -1
            off = 6 + len(arrow.word) * 3.1 * across + 3 * up
            at = x + sign * off * across, y - off * up + 4
            yield f'<text class="word" x="{at[0]:.1f}" y="{at[1]:.1f}">{escape(arrow.word)}</text>'


def _ends(start: Box, end: Box) -> tuple[tuple[float, float], tuple[float, float]]:
    if start.row == end.row:
        sign = 1 if end.x > start.x else -1
        y = start.y + min(start.height, end.height) / 2
        return (start.x + sign * start.width / 2, y), (end.x - sign * end.width / 2, y)
    upper, lower = (start, end) if start.row < end.row else (end, start)
    # As upright as both boxes allow.
    left = max(upper.x - upper.width / 2, lower.x - lower.width / 2) + 12
    right = min(upper.x + upper.width / 2, lower.x + lower.width / 2) - 12
    if left <= right:
        x = min(max((upper.x + lower.x) / 2, left), right)
        above, below = (x, upper.y + upper.height), (x, lower.y)
    else:
        sign = 1 if lower.x > upper.x else -1
        above = upper.x + sign * (upper.width / 2 - 14), upper.y + upper.height
        below = lower.x - sign * (lower.width / 2 - 14), lower.y
    return (above, below) if upper is start else (below, above)


def _crosses(box: Box, start: tuple[float, float], end: tuple[float, float]) -> bool:
    steps = 60
    for step in range(steps + 1):
        x = start[0] + (end[0] - start[0]) * step / steps
        y = start[1] + (end[1] - start[1]) * step / steps
        if abs(x - box.x) < box.width / 2 and box.y < y < box.y + box.height:
            return True
    return False
