"""Sampled stacks and imports become trees, and trees become flame graphs."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from tests.bench.flames import flame_graph, owner_of
from tests.bench.stacks import by_package, from_folded, from_importtime

SVG = "{http://www.w3.org/2000/svg}"
FOLDED = [
    "main (shim/server.py:10);run (api/aio/loop.py:5);create (shim/container.py:7) 6\n",
    "main (shim/server.py:10);run (api/aio/loop.py:6);create (shim/container.py:9) 2\n",
    "main (shim/server.py:10);run (api/aio/loop.py:6);select (selectors.py:1) 1\n",
    "main (shim/server.py:10) 1\n",
]
IMPORTS = """\
import time: self [us] | cumulative | imported package
import time:       100 |        100 |   zipimport
import time:       200 |        200 |     api.errors
import time:       300 |        500 |   shim.errors
import time:       400 |       1000 | shim
import time:        50 |         50 | os
"""


def test_lines_of_a_function_are_one_and_samples_add_up() -> None:
    tree = from_folded(FOLDED, "all")
    assert tree.total == 10
    main = tree.below["main (shim/server.py)"]
    assert main.own == 1
    assert main.below["run (api/aio/loop.py)"].below["create (shim/container.py)"].own == 8


def test_part_below_a_function_can_be_taken_out() -> None:
    tree = from_folded(FOLDED, "all")
    assert tree.from_fork("run (api").total == 9
    assert tree.from_fork("not there") is tree


def test_what_is_small_is_counted_where_it_was_called() -> None:
    pruned = from_folded(FOLDED, "all").without_small(2)
    run = pruned.below["main (shim/server.py)"].below["run (api/aio/loop.py)"]
    assert list(run.below) == ["create (shim/container.py)"]
    assert (run.own, pruned.total) == (1, 10)


def test_imports_are_below_what_imported_them() -> None:
    tree = from_importtime(IMPORTS, "start")
    assert list(tree.below) == ["shim", "os"]
    shim = tree.below["shim"]
    assert list(shim.below) == ["zipimport", "shim.errors"]
    assert shim.below["shim.errors"].below["api.errors"].own == pytest.approx(0.2)
    assert shim.total == pytest.approx(1.0)
    assert tree.total == pytest.approx(1.05)
    packages = by_package(tree)
    assert list(packages) == ["shim", "api", "zipimport", "os"]
    assert packages["shim"][0] == 2
    assert packages["shim"][1] == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("run (api/aio/loop.py)", "api"),
        ("create (shim/container.py)", "shim"),
        ("inject (hooks/engine.py)", "hooks"),
        ("select (selectors.py)", "other"),
        ("google.protobuf", "other"),
        ("shim", "shim"),
        ("shim.server", "shim"),
        ("shimmer", "other"),
    ],
)
def test_owner_is_told_by_file_or_module(name: str, owner: str) -> None:
    assert owner_of(name) == owner


def test_flame_graph_is_as_wide_as_time() -> None:
    picture = ET.fromstring(flame_graph(from_folded(FOLDED, "all"), "a <title>", "samples"))
    boxes = {
        box.findtext(f"{SVG}title"): float(box.attrib["width"])
        for box in picture.iter(f"{SVG}rect")
        if box.find(f"{SVG}title") is not None
    }
    whole = boxes["all: 10 samples, 100.0 %"]
    assert boxes["create (shim/container.py): 8 samples, 80.0 %"] == pytest.approx(
        0.8 * whole, 0.01
    )
    assert boxes["select (selectors.py): 1 samples, 10.0 %"] == pytest.approx(0.1 * whole, 0.01)


def test_nothing_sampled_is_an_empty_picture() -> None:
    assert "<svg" in flame_graph(from_folded([], "all"), "nothing", "samples")
