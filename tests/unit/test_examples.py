"""The tests' examples are the same in each run, unless new ones are requested."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.harness.examples import FIXED, RANDOM, THOROUGH
from tests.harness.launcher import REPOSITORY

_TRY = """
from hypothesis import given, strategies as st
from tests.harness.examples import load_profile, seeds
load_profile()

@given(st.integers())
def show(number):
    print(number)

show()
print(seeds(3))
"""

_SEEDS = "from tests.harness.examples import seeds; print(seeds(3))"


def tried(choice: str, script: str = _TRY, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
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
    assert 30 < first.count("\n") < 100
    assert first.endswith("[1, 2, 3]\n")


def test_what_is_imported_does_not_change_the_examples() -> None:
    script = _TRY.replace("st.integers()", "st.lists(st.integers(), min_size=20)")
    assert tried(FIXED, f"import hooks.engine\n{script}") == tried(FIXED, script)


def test_thorough_runs_try_many() -> None:
    first = tried(THOROUGH)
    assert first.count("\n") > 1000
    assert len(first.splitlines()[-1].split(",")) > 3


def test_workers_side_by_side_have_the_same_seeds() -> None:
    one, other, two = (
        tried(RANDOM, _SEEDS, PYTEST_XDIST_TESTRUNUID=run) for run in ("one", "one", "two")
    )
    assert one == other
    assert one != two


def test_others_are_tried_where_that_is_asked() -> None:
    first, second = tried(RANDOM), tried(RANDOM)
    assert first != second
    assert first.splitlines()[-1] != second.splitlines()[-1]
    assert first.count("\n") > 1000


def test_a_seed_that_failed_is_tried_again() -> None:
    assert tried(RANDOM, _SEEDS, NVSHIM_TEST_SEED="77") == "[77]\n"


@pytest.mark.parametrize("choice", ["", "rnadom"])
def test_a_choice_that_is_none_is_refused(choice: str) -> None:
    assert "InvalidArgument" in tried(choice)
