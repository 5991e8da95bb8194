"""A program does the same on our own loop as on asyncio."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.unit.loop.programs import Step, on_asyncio, on_ours, programs


@given(programs())
def test_what_comes_of_a_program_is_the_same_on_both_loops(program: list[Step]) -> None:
    assert on_ours(program, pytest.MonkeyPatch()) == on_asyncio(program)
