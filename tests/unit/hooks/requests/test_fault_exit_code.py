"""The exit code that a container requests for the case that a GPU failure ends it."""

from __future__ import annotations

from typing import Any

import pytest

from hooks.errors import FaultExitCodeWrong
from hooks.requests.prefilter import FAULT_EXIT_CODE, read_fault_exit_code
from tests.harness.raising import raises


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        (None, None),
        ({}, None),
        ([], None),
        ({"other": "1"}, None),
        ({FAULT_EXIT_CODE: "0"}, 0),
        ({FAULT_EXIT_CODE: "85"}, 85),
        ({FAULT_EXIT_CODE: "255"}, 255),
    ],
)
def test_a_wish_is_an_exit_code_or_none(annotations: Any, expected: int | None) -> None:
    assert read_fault_exit_code({"annotations": annotations}) == expected


@pytest.mark.parametrize("wish", ["", "256", "-1", "0x55", "85 ", "eighty", "0085", "²", 85])
def test_anything_else_is_an_error_that_quotes_it(wish: Any) -> None:
    with raises(FaultExitCodeWrong, match=repr(wish)):
        read_fault_exit_code({"annotations": {FAULT_EXIT_CODE: wish}})
