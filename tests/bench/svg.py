"""Pictures: the few shapes that charts are made of, legible in light and in dark.

A picture has no background of its own, and its colours change with those of whoever looks at it
(``prefers-color-scheme``). Nothing is told by colour alone.

Source: SVG 2, CSS Media Queries 5; the colours are Okabe's and Ito's, told apart by everybody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Iterable

_STYLE: Final = """\
text{font:12px system-ui,sans-serif;fill:#24292f}
.small{font-size:10.5px;fill:#57606a}.bold{font-weight:600}
.end{text-anchor:end}.middle{text-anchor:middle}
.grid{stroke:#d0d7de;stroke-width:1}.axis{stroke:#57606a;stroke-width:1}
.mark{stroke:#24292f;stroke-width:2}.dashed{stroke-dasharray:4 3}
.line{fill:none;stroke-width:2}
.s0{stroke:#0072b2}.f0{fill:#0072b2}.s1{stroke:#d55e00}.f1{fill:#d55e00}
.s2{stroke:#007a5a}.f2{fill:#007a5a}.s3{stroke:#57606a}.f3{fill:#8c959f}
@media(prefers-color-scheme:dark){
text{fill:#e6edf3}.small{fill:#9da7b3}
.grid{stroke:#30363d}.axis{stroke:#9da7b3}.mark{stroke:#e6edf3}
.s0{stroke:#56b4e9}.f0{fill:#56b4e9}.s1{stroke:#f0883e}.f1{fill:#f0883e}
.s2{stroke:#3fc79a}.f2{fill:#3fc79a}.s3{stroke:#9da7b3}.f3{fill:#6e7681}}
"""

CHARACTER: Final = 6.3
"""About how wide a character of a text is, in the picture's units."""


class Picture:
    """A picture that is being drawn. Units are pixels, from the upper left corner.

    Args:
        width: of the picture.
        height: of the picture.
        title: what it shows, for those who cannot see it.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self._svg = ET.Element(
            "svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width:g} {height:g}",
            width=f"{width:g}", height=f"{height:g}", role="img",
        )  # fmt: skip
        self._svg.set("aria-label", title)
        ET.SubElement(self._svg, "title").text = title
        ET.SubElement(self._svg, "style").text = _STYLE

    def shape(self, tag: str, kind: str = "", **attributes: float | str) -> ET.Element:
        """Add a shape; ``kind`` is a class of the style, and numbers have one decimal."""
        written = {
            name: value if isinstance(value, str) else f"{round(value, 1):g}"
            for name, value in attributes.items()
        }
        if kind:
            written["class"] = kind
        return ET.SubElement(self._svg, tag, written)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """A straight line."""
        self.shape("line", kind, x1=x1, y1=y1, x2=x2, y2=y2)

    def points(self, tag: str, points: Iterable[tuple[float, float]], kind: str) -> None:
        """A ``polyline`` or a ``polygon``."""
        self.shape(tag, kind, points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points))

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """A line of text whose base is at ``y``."""
        self.shape("text", kind, x=x, y=y).text = words

    def render(self) -> str:
        """The picture as a file's content."""
        ET.indent(self._svg, "")
        return ET.tostring(self._svg, encoding="unicode") + "\n"
