"""Limits as they are passed to the low-level runtime."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shim.cgroup.resources import encode
from shim.errors import InvalidResources, ShimError
from tests.harness.raising import is_error, raises


@pytest.mark.parametrize(
    ("limits", "handed_on"),
    [
        ({}, {}),
        ({"memory": {"limit": 1, "swap": -1}}, {"memory": {"limit": 1, "swap": -1}}),
        ({"cpu": {"shares": 2, "cpus": "0-1"}}, {"cpu": {"shares": 2, "cpus": "0-1"}}),
        ({"cpu": None, "pids": {"limit": None}}, {"pids": {}}),
        ({"devices": [{"allow": False}], "pids": {"limit": 5}}, {"pids": {"limit": 5}}),
        ({"devices": "not even a list"}, {}),
        ({"unified": {"memory.high": "5"}}, {"unified": {"memory.high": "5"}}),
        (
            {"hugepageLimits": [{"pageSize": "2MB", "limit": 0}]},
            {"hugepageLimits": [{"pageSize": "2MB", "limit": 0}]},
        ),
        ({"tomorrow": [1], "cpu": {"tomorrow": {}}}, {"tomorrow": [1], "cpu": {"tomorrow": {}}}),
    ],
)
def test_limits_are_handed_on(limits: dict[str, Any], handed_on: dict[str, Any]) -> None:
    assert json.loads(encode(limits)) == handed_on


@pytest.mark.parametrize(
    ("limits", "blamed"),
    [
        ({"cpu": []}, "cpu"),
        ({"memory": "1G"}, "memory"),
        ({"memory": {"limit": "1G"}}, "memory.limit"),
        ({"memory": {"limit": 1.0}}, "memory.limit"),
        ({"memory": {"limit": True}}, "memory.limit"),
        ({"memory": {"disableOOMKiller": 1}}, "memory.disableOOMKiller"),
        ({"memory": {"limit": 2**64}}, "memory.limit"),
        ({"cpu": {"cpus": 1}}, "cpu.cpus"),
        ({"unified": {"memory.high": 5}}, "unified.memory.high"),
        ({"unified": ["memory.high"]}, "unified"),
        ({"hugepageLimits": {}}, "hugepageLimits"),
        ({"tomorrow": float("nan")}, "resources"),
    ],
)
def test_what_is_malformed_is_blamed_by_its_name(limits: dict[str, Any], blamed: str) -> None:
    with raises(InvalidResources, match=f"cannot change {blamed}:"):
        encode(limits)


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
_names = st.sampled_from(["memory", "cpu", "pids", "blockIO", "unified", "devices", "limit"])


@given(st.dictionaries(_names | st.text(), _values))
def test_whatever_was_sent_is_encoded_or_refused(limits: dict[str, Any]) -> None:
    try:
        encoded = encode(limits)
    except ShimError as error:
        assert is_error(error, InvalidResources)  # noqa: PT017 - either outcome is right
        return
    assert "devices" not in json.loads(encoded)
    assert None not in json.loads(encoded).values()
