"""Charts are self-contained and show every value; missing values are not drawn."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from tests.bench.charts import draw, main
from tests.bench.results import Comparison, Curve, Results, Row

if TYPE_CHECKING:
    from pathlib import Path

SVG = "{http://www.w3.org/2000/svg}"
CURVE = Curve(
    "a start <&>", "GPUs", "ms", (1, 8, 16),
    {"stock": Row("runc-v2", (100, 100, 100)), "ours": Row("nvidia-v1", (80, 160, 240))},
)  # fmt: skip


def _words(picture: str) -> set[str]:
    return {text.text or "" for text in ET.fromstring(picture).iter(f"{SVG}text")}


def test_a_curve_has_a_point_for_each_value_and_says_what_it_is_of() -> None:
    (picture,) = draw(Results(curves={"gpus": CURVE})).values()
    assert len(list(ET.fromstring(picture).iter(f"{SVG}circle"))) == 6
    assert {"GPUs", "ms", "runc-v2", "nvidia-v1", "a start <&>, by GPUs"} <= _words(picture)


def test_a_picture_asks_nobody_for_anything_and_has_colours_for_the_dark() -> None:
    (picture,) = draw(Results(curves={"gpus": CURVE})).values()
    assert "prefers-color-scheme:dark" in picture
    asked = [
        (element.tag, name, value)
        for element in ET.fromstring(picture).iter()
        for name, value in element.attrib.items()
        if "://" in value or element.tag.endswith("script")
    ]
    assert asked == []
    assert "@import" not in picture
    assert "url(" not in picture


def test_a_ratio_is_told_beside_what_it_has_to_be_and_one_far_off_in_full() -> None:
    def seen(ours: float) -> set[str]:
        rows = {"stock": Row("", (2.0, 2.0)), "ours": Row("", (ours, ours))}
        pictures = draw(Results(comparisons={"runs": Comparison("", "ms", rows)}))
        assert list(pictures) == ["targets"]
        return _words(pictures["targets"])

    assert {"0.50", "0.70", "a container, warm"} <= seen(1.0)
    assert "18.00" in seen(36.0)


def test_modules_are_imported_without_a_warning_after_it() -> None:
    assert importlib.util.find_spec("no_module_has_this_name") is None


def test_charts_are_files_by_their_keys(tmp_path: Path) -> None:
    assert draw(Results()) == {}
    path = str(tmp_path / "bench.json")
    Results(curves={"gpus": CURVE}).write(path)
    assert main([path, str(tmp_path / "pictures")]) == 0
    assert [entry.name for entry in (tmp_path / "pictures").iterdir()] == ["gpus.svg"]
