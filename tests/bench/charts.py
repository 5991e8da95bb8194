"""``python -m tests.bench.charts JSON… DIRECTORY``: draw the measurements as pictures.

It writes one file for each curve, named by its key, and ``targets.svg`` for the targets. If several
JSON files have the same key, the last file counts.

A picture has no background, and its text and lines adapt to the reader's colour scheme
(``prefers-color-scheme``). The colours are those of Okabe and Ito, which colour-blind people can
distinguish.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import TYPE_CHECKING, Any, Final

import pygal
from pygal.style import Style

from tests.bench.results import Results
from tests.bench.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.results import Curve

# It hooks imports for map plugins in a way that makes Python warn at each later import.
sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__ != pygal.__name__]

_TARGETS: Final = "targets"
_COLOURS: Final = {"stock": "#8c959f", "ours": "#0072b2", "gpus": "#d55e00", "first": "#009e73"}
_DASHES: Final = ("none", "7,4", "2,4", "9,3,2,3")  # lines do not differ only by colour
# A bar that is far off would leave no room for the others, so only its number is shown.
_FARTHEST: Final = 3.0

_SCRIPTS: Final = re.compile(r"<script.*?</script>|<!--.*?-->", re.DOTALL)
_DARK: Final = (
    "inline:@media(prefers-color-scheme:dark){"
    ".title,.legend text,.axis text{fill:#e6edf3 !important}"
    ".guide.line,.line.axis,.axis .line{stroke:#484f58 !important}}"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the files, and draw."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.charts", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="JSON", help="written by python -m tests.bench")
    parser.add_argument("directory", metavar="DIRECTORY", help="made if missing")
    asked = parser.parse_args(arguments)
    results = Results.of_files(asked.files)
    write_charts(results, asked.directory)
    return 0


def write_charts(results: Results, directory: str) -> None:
    """Draw the measurements.

    Args:
        results: what was measured; charts without data are not drawn.
        directory: created if missing. Its pictures are replaced; other files stay.
    """
    os.makedirs(directory, exist_ok=True)
    for name, content in draw(results).items():
        with open(os.path.join(directory, f"{name}.svg"), "w", encoding="utf-8") as file:
            file.write(content)


def draw(results: Results) -> dict[str, str]:
    """Return the pictures by their names."""
    pictures = {key: _curve(curve) for key, curve in results.curves.items()}
    ratios = [
        (target.label, value, target.must)
        for target in TARGETS
        if target.label and (value := target.found(results)) is not None
    ]
    if ratios:
        pictures[_TARGETS] = _bars(ratios)
    return pictures


def _curve(curve: Curve) -> str:
    """Draw how a cost grows; both axes are linear, so that linear growth is a straight line."""
    colours = [_COLOURS.get(key, "#56b4e9") for key in curve.lines]
    chart = pygal.XY(
        **_looks(colours), width=560, height=340, title=f"{curve.title}, by {curve.axis}",
        x_title=curve.axis, y_title=curve.unit, include_x_axis=True, dots_size=4,
    )  # fmt: skip
    for line, dashes in zip(curve.lines.values(), _DASHES, strict=False):
        points = list(zip(curve.places, line.values, strict=True))
        chart.add(line.title, points, stroke_style={"width": 2, "dasharray": dashes})
    return _rendered(chart)


def _bars(ratios: Sequence[tuple[str, float, float | None]]) -> str:
    """Draw ratios to containerd's own shim, each above its highest allowed value."""
    chart = pygal.HorizontalBar(
        **_looks(["#d0d7de", "#56b4e9"]), width=760, height=60 + 46 * len(ratios),
        title="containerd-shim-nvidia-v1 ÷ containerd-shim-runc-v2 without a GPU",
        print_values=True, value_formatter="{:.2f}".format,
    )  # fmt: skip
    # The library draws from the bottom to the top.
    shown = ratios[::-1]
    chart.x_labels = [label for label, _, _ in shown]
    chart.add("at most", [must for _, _, must in shown])
    chart.add(
        "seen",
        [
            {
                "value": min(value, _FARTHEST),
                "label": label,
                "formatter": lambda _, v=value: f"{v:.2f}",
            }
            for label, value, _ in shown
        ],
    )
    return _rendered(chart)


def _looks(colours: Sequence[str]) -> dict[str, Any]:
    style = Style(
        background="transparent", plot_background="transparent", colors=tuple(colours),
        foreground="#24292f", foreground_strong="#24292f", foreground_subtle="#57606a",
        font_family="system-ui,sans-serif", title_font_size=15, label_font_size=12,
        legend_font_size=12, value_font_size=11, major_label_font_size=12, opacity="1",
        guide_stroke_color="#d0d7de", major_guide_stroke_color="#d0d7de",
        value_colors=("#24292f",) * 2,
    )  # fmt: skip
    return {
        "style": style, "js": (), "no_prefix": True, "legend_at_bottom": True,
        "css": ["file://style.css", "file://graph.css", _DARK], "explicit_size": True,
        "disable_xml_declaration": True, "show_x_guides": False, "margin": 12,
    }  # fmt: skip


def _rendered(chart: Any) -> str:
    # A picture in a page runs no script; a comment contains the date of the drawing.
    return _SCRIPTS.sub("", chart.render(is_unicode=True)) + "\n"


if __name__ == "__main__":
    sys.exit(main())
