"""The tests' own examples: the same in each run, unless others are looked for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.harness.examples import FIXED, RANDOM
from tests.harness.launcher import REPOSITORY

_TRY = """
from hypothesis import given, strategies as st
from tests.harness.examples import load_profile, seeds
load_profile()

@given(st.text(), st.sets(st.integers()))
def show(text, numbers):
    print(ascii(text), sorted(numbers))

show()
print(seeds(3))
"""


def tried(choice: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _TRY],
        cwd=REPOSITORY,
        env={"PATH": os.environ["PATH"], "NVSHIM_TEST_EXAMPLES": choice, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_examples_are_the_same_in_each_run() -> None:
    first, second = tried(FIXED), tried(FIXED)
    assert first == second
    assert first.count("\n") > 100
    assert first.endswith("[1, 2, 3]\n")


def test_others_are_tried_where_that_is_asked() -> None:
    first, second = tried(RANDOM), tried(RANDOM)
    assert first != second
    assert first.splitlines()[-1] != second.splitlines()[-1]
    assert first.count("\n") > 1000


def test_a_seed_that_failed_is_tried_again() -> None:
    assert tried(RANDOM, NVSHIM_TEST_SEED="77").endswith("[77]\n")


@pytest.mark.parametrize("choice", ["", "rnadom"])
def test_a_choice_that_is_none_is_refused(choice: str) -> None:
    assert "InvalidArgument" in tried(choice)
