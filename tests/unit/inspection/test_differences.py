from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.inspection.differences import differences, render_differences


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, ["a", "  ~ 1 → 2"]),
        ({"a": True}, {"a": 1}, ["a", "  ~ true → 1"]),
        ({"a": None}, {}, ["a", "  - null"]),
        ({}, {"a": []}, ["a", "  + []"]),
        ({}, {"a": {"b": ["x", "y"]}}, ["a.b", "  + x", "  + y"]),
        ({"a": {"b": ["x"]}}, {"a": {"b": ["x", "y"]}}, ["a.b", "  + y"]),
        ({"a": ["x", "y", "z"]}, {"a": ["x", "z"]}, ["a", "  - y"]),
        ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}, ["a", '  - {"b": 1}', '  + {"b": 2}']),
        ({"a": [1]}, {"a": {"b": 1}}, ["a", '  ~ [1] → {"b": 1}']),
        ({}, {"a": "x\x1b[2J\ny\u202e"}, ["a", r"  + x\x1b[2J\ny\u202e"]),
        ({}, {"k\n": 1}, [r"k\n", "  + 1"]),
    ],
)
def test_what_differs_is_told(
    before: dict[str, Any], after: dict[str, Any], told: list[str]
) -> None:
    assert list(render_differences(differences(before, after))) == told


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=3), JSON), st.dictionaries(st.text(max_size=3), JSON))
def test_nothing_differs_only_where_nothing_does(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert differences(one, one) == []
    if one != other:
        assert differences(one, other)
    lines = list(render_differences(differences(one, other)))
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("entries", [["A=b"] * 60_000, [f"A{n % 7}=b" for n in range(60_000)]])
def test_an_image_with_a_long_list_holds_nobody_up(entries: list[str]) -> None:
    before = {"env": ["first", *entries, "last"]}
    after = {"env": ["new", *entries, "last", "newer"]}
    began = time.process_time()
    told = [(each.kind, each.before, each.after) for each in differences(before, after)]
    assert told == [
        ("removed", "first", None),
        ("added", None, "new"),
        ("added", None, "newer"),
    ]
    assert time.process_time() - began < 10  # it took hours before
