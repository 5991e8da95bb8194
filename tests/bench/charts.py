"""``python -m tests.bench.charts JSON… DIRECTORY``: what was measured, as pictures.

One file for each curve, named by its key, and ``targets.svg`` for what is to be reached. Of
several JSON files, a later one's word counts.

A picture has no background of its own, and its text and lines change with those of whoever looks at
it (``prefers-color-scheme``). The colours are Okabe's and Ito's, told apart by everybody.
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

# It hooks imports for plugins with maps, in a way of which Python warns at each later import.
sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__ != pygal.__name__]

_TARGETS: Final = "targets"
_COLOURS: Final = {"stock": "#8c959f", "ours": "#0072b2", "gpus": "#d55e00", "first": "#009e73"}
_DASHES: Final = ("none", "7,4", "2,4", "9,3,2,3")  # nothing is told by colour alone
# One that is far off would leave no room for the others; its number is told.
_FARTHEST: Final = 3.0

_SCRIPTS: Final = re.compile(r"<script.*?</script>|<!--.*?-->", re.DOTALL)
_DARK: Final = (
    "inline:@media(prefers-color-scheme:dark){"
    ".title,.legend text,.axis text{fill:#e6edf3 !important}"
    ".guide.line,.line.axis,.axis .line{stroke:#484f58 !important}}"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, and draw."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.charts", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="JSON", help="written by python -m tests.bench")
    parser.add_argument("directory", metavar="DIRECTORY", help="made if missing")
    asked = parser.parse_args(arguments)
    results = Results.of_files(asked.files)
    write_charts(results, asked.directory)
    return 0


def write_charts(results: Results, directory: str) -> None:
    """Draw what was measured.

    Args:
        results: what was measured; what was not is not drawn.
        directory: made if missing. A picture in it is replaced, others stay.
    """
    os.makedirs(directory, exist_ok=True)
    for name, content in draw(results).items():
        with open(os.path.join(directory, f"{name}.svg"), "w", encoding="utf-8") as file:
            file.write(content)


def draw(results: Results) -> dict[str, str]:
    """The pictures by their names."""
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
    """How something grows; both axes are linear, so that a line is a line."""
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
    """Ratios to containerd's own shim, each above what it has to be at most."""
    chart = pygal.HorizontalBar(
        **_looks(["#d0d7de", "#56b4e9"]), width=760, height=60 + 46 * len(ratios),
        title="containerd-shim-nvidia-v1 ÷ containerd-shim-runc-v2 without a GPU",
        print_values=True, value_formatter="{:.2f}".format,
    )  # fmt: skip
    # It draws from below to above.
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
    # A picture in a page runs no script; a comment has the day on which it was drawn.
    return _SCRIPTS.sub("", chart.render(is_unicode=True)) + "\n"


if __name__ == "__main__":
    sys.exit(main())
