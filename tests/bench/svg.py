"""Pictures as text: the few shapes that charts are made of, legible in light and in dark.

A picture has no background of its own, and its colours change with those of whoever looks at it
(``prefers-color-scheme``). Nothing is told by colour alone.

Source: SVG 2, CSS Media Queries 5; the colours are Okabe's and Ito's, told apart by everybody.
"""

from __future__ import annotations

from html import escape
from typing import Final

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
        style: more rules of CSS.
    """

    def __init__(self, width: float, height: float, title: str, *, style: str = "") -> None:
        self._size = width, height
        self._title = title
        self._style = _STYLE + style
        self._shapes: list[str] = []

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """A straight line; ``kind`` is a class of the style, as everywhere here."""
        self._shapes.append(
            f'<line class="{kind}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>'
        )

    def path(self, points: list[tuple[float, float]], kind: str) -> None:
        """Straight lines from point to point."""
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._shapes.append(f'<polyline class="{kind}" points="{text}"/>')

    def polygon(self, points: list[tuple[float, float]], kind: str) -> None:
        """A filled shape."""
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._shapes.append(f'<polygon class="{kind}" points="{text}"/>')

    def box(
        self, x: float, y: float, width: float, height: float, kind: str, *, hint: str = ""
    ) -> None:
        """A filled rectangle; ``hint`` is shown to whoever points at it."""
        shape = (
            f'<rect class="{kind}" x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}"'
        )
        told = f"><title>{escape(hint)}</title></rect>" if hint else "/>"
        self._shapes.append(shape + told)

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """A line of text whose base is at ``y``."""
        marked = f' class="{kind}"' if kind else ""
        self._shapes.append(f'<text{marked} x="{x:.1f}" y="{y:g}">{escape(words)}</text>')

    def upright(self, x: float, y: float, words: str, kind: str = "") -> None:
        """A line of text that is read from below."""
        self._shapes.append(
            f'<text class="{kind}" transform="translate({x:g} {y:g}) rotate(-90)">'
            f"{escape(words)}</text>"
        )

    def render(self) -> str:
        """The picture as a file's content."""
        width, height = self._size
        title = escape(self._title)
        return "\n".join(
            [
                (
                    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
                    f'width="{width:g}" height="{height:g}" role="img" aria-label="{title}">'
                ),
                f"<title>{title}</title>",
                f"<style>{self._style}</style>",
                *self._shapes,
                "</svg>\n",
            ]
        )
