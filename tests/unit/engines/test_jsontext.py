"""Edits of JSON text: only the member changes, and a removal undoes an insertion."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.engines import jsontext


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("{}\n", '{\n    "a": {\n        "b": 1\n    }\n}\n'),
        ('{"x":1}', '{"x":1, "a": {"b": 1}}'),
        ('{\n  "x": 1\n}\n', '{\n  "x": 1,\n  "a": {\n    "b": 1\n  }\n}\n'),
        ('{\n\t"a": {},\n\t"z": 0\n}', '{\n\t"a": {\n\t\t"b": 1\n\t},\n\t"z": 0\n}'),
        ('{"a": {"c": [1,\n2]}}', '{"a": {"c": [1,\n2], "b": 1}}'),
        ('{\r\n  "x": 1\r\n}', '{\r\n  "x": 1,\r\n  "a": {\r\n    "b": 1\r\n  }\r\n}'),
    ],
)
def test_member_looks_as_its_neighbours_do(text: str, after: str) -> None:
    assert jsontext.set_member(text, ("a", "b"), 1) == after


def test_value_is_exchanged_in_its_place() -> None:
    text = '{ "a" : "old" , "b":2 }'
    assert jsontext.set_member(text, ("a",), "new") == '{ "a" : "new" , "b":2 }'


def test_member_cannot_be_put_into_what_is_no_object() -> None:
    with pytest.raises(ValueError, match="not an object"):
        jsontext.set_member('{"a": 1}', ("a", "b"), 1)


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ('{"a": 1, "b": 2, "c": 3}', '{"a": 1, "c": 3}'),
        ('{"b": 2, "c": 3}', '{"c": 3}'),
        ('{\n  "b": 2\n}', "{}"),
        ('{"c": 3}', '{"c": 3}'),
    ],
)
def test_member_is_taken_out(text: str, after: str) -> None:
    assert jsontext.remove_member(text, ("b",)) == after


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=4)


@given(OBJECTS, st.sampled_from([None, 1, 2, 4, "\t"]), st.booleans())
def test_every_document_says_the_same_but_for_the_member(
    document: dict[str, Any], indent: Any, ascii_only: bool
) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only)
    document.pop("new", None)
    text = jsontext.remove_member(text, ("new",))
    assert json.loads(text) == document
    new = jsontext.set_member(text, ("new", "deep"), [1, {"x": "y"}])
    assert json.loads(new) == {**document, "new": {"deep": [1, {"x": "y"}]}}
    again = jsontext.remove_member(new, ("new",))
    assert json.loads(again) == document
    if document:
        assert again == text
