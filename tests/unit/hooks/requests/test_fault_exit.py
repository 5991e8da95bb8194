"""The exit code that a container wishes for, if a failure of a GPU ends it."""

from __future__ import annotations

from typing import Any

import pytest

from hooks.errors import FaultExitCodeWrong
from hooks.requests.fault_exit import ANNOTATION, read_wish


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        (None, None),
        ({}, None),
        ([], None),
        ({"other": "1"}, None),
        ({ANNOTATION: "0"}, 0),
        ({ANNOTATION: "85"}, 85),
        ({ANNOTATION: "255"}, 255),
    ],
)
def test_a_wish_is_an_exit_code_or_none(annotations: Any, expected: int | None) -> None:
    assert read_wish({"annotations": annotations}) == expected


@pytest.mark.parametrize("wish", ["", "256", "-1", "0x55", "85 ", "eighty", "0085", "²", 85])
def test_anything_else_is_an_error_that_quotes_it(wish: Any) -> None:
    with pytest.raises(FaultExitCodeWrong, match=repr(wish)):
        read_wish({"annotations": {ANNOTATION: wish}})
