"""Charts are well-formed pictures in which every value has its place, and small."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from tests.bench.charts import draw, main
from tests.bench.plots import Bar, bar_chart, curve_chart, ticks
from tests.bench.results import Comparison, Curve, Results, Row

if TYPE_CHECKING:
    from pathlib import Path

SVG = "{http://www.w3.org/2000/svg}"
CURVE = Curve(
    "a start <&>", "GPUs", "ms", (1, 8, 16),
    {"stock": Row("runc-v2", (100, 100, 100)), "ours": Row("nvidia-v1", (80, 160, 240))},
)  # fmt: skip


def _points(picture: ET.Element, number: int) -> list[tuple[float, float]]:
    line = picture.findall(f"{SVG}polyline")[number]
    pairs = (pair.split(",") for pair in line.attrib["points"].split())
    return [(float(x), float(y)) for x, y in pairs]


def _words(picture: ET.Element) -> list[str]:
    return [text.text or "" for text in picture.iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (16, [0, 5, 10, 15, 20]),
        (240, [0, 50, 100, 150, 200, 250]),
        (1.2, [0, 0.5, 1, 1.5]),
        (5, [0, 1, 2, 3, 4, 5]),
        (0.03, [0, 0.01, 0.02, 0.03]),
        (0, [0, 1]),
    ],
)
def test_ticks_are_round_and_reach_the_most(most: float, expected: list[float]) -> None:
    assert ticks(most) == expected


def test_straight_line_is_drawn_straight_and_above_what_is_less() -> None:
    picture = ET.fromstring(curve_chart(CURVE))
    flat, rising = _points(picture, 0), _points(picture, 1)
    assert len({y for _, y in flat}) == 1
    assert rising[0][1] > flat[0][1] > rising[1][1] > rising[2][1]
    # 16 is as far from 8 as 8 from 0, and no value is left out of the picture.
    assert rising[2][0] - rising[1][0] == pytest.approx((rising[1][0] - rising[0][0]) * 8 / 7, 0.01)
    width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
    assert all(0 < x < width and 0 < y < height for x, y in flat + rising)


def test_axes_have_names_and_units_and_lines_have_titles() -> None:
    words = _words(ET.fromstring(curve_chart(CURVE)))
    assert {"GPUs", "ms", "runc-v2", "nvidia-v1", "a start <&>, by GPUs"} <= set(words)


def test_picture_has_colours_for_the_dark_and_a_title_for_the_blind() -> None:
    text = curve_chart(CURVE)
    assert "prefers-color-scheme:dark" in text
    picture = ET.fromstring(text)
    assert picture.attrib["role"] == "img"
    assert picture.findtext(f"{SVG}title") == "a start <&> (ms) by GPUs"
    assert len(text) < 10_000


def test_bars_are_as_long_as_their_ratios_and_told() -> None:
    bars = [Bar("a", 0.5, 0.95, 0.8), Bar("b", 1.0, None, 1.0), Bar("c", 2.0, 1.5, 1.0)]
    picture = ET.fromstring(bar_chart("ratios", bars, one="stock"))
    boxes = picture.findall(f"{SVG}rect")
    lengths = [float(box.attrib["width"]) for box in boxes]
    assert lengths == pytest.approx([lengths[1] / 2, lengths[1], 2 * lengths[1]], rel=0.01)
    assert [box.attrib["class"] for box in boxes] == ["f2", "f2", "f1"]
    assert {"a", "b", "c", "0.50", "1.00", "2.00"} <= set(_words(picture))


def test_bar_that_is_far_off_leaves_room_for_the_others() -> None:
    bars = [Bar("a", 18.0, 1.0, 0.7), Bar("b", 1.0, 1.0, 0.7)]
    picture = ET.fromstring(bar_chart("ratios", bars, one="stock"))
    far, near = (float(box.attrib["width"]) for box in picture.findall(f"{SVG}rect"))
    assert far == pytest.approx(3 * near, rel=0.01)
    assert "18.00" in _words(picture)


def test_what_was_not_measured_is_not_drawn() -> None:
    assert draw(Results()) == {}
    runs = Comparison("", "ms", {"stock": Row("", (2.0, 2.0)), "ours": Row("", (1.0, 1.0))})
    pictures = draw(Results(comparisons={"runs": runs}))
    assert list(pictures) == ["targets"]
    assert len(ET.fromstring(pictures["targets"]).findall(f"{SVG}rect")) == 1


def test_charts_are_files_by_their_keys(tmp_path: Path) -> None:
    path = str(tmp_path / "bench.json")
    Results(curves={"gpus": CURVE}).write(path)
    assert main([path, str(tmp_path / "pictures")]) == 0
    assert [entry.name for entry in (tmp_path / "pictures").iterdir()] == ["gpus.svg"]
