from __future__ import annotations

import sys
import time

from integration.inventory import ask


def test_an_answer_larger_than_a_pipe_is_whole() -> None:
    assert ask([sys.executable, "-c", "print('x' * 1_000_000, end='')"], 10) == b"x" * 1_000_000


def test_a_program_that_hangs_is_ended() -> None:
    begun = time.monotonic()
    assert ask(["sleep", "1000"], 0.1) is None
    assert time.monotonic() - begun < 30


def test_a_program_that_is_not_there_has_no_answer() -> None:
    assert ask(["/nonexistent/program"], 1) is None


def test_nothing_of_our_environment_is_told() -> None:
    assert ask(["/usr/bin/env"], 10) == b""
