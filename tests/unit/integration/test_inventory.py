from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from integration.nvml.query import ask

if TYPE_CHECKING:
    from pathlib import Path

_LARGE = [sys.executable, "-c", "print('x' * 1_000_000, end='')"]


def test_an_answer_larger_than_a_pipe_is_whole(tmp_path: Path) -> None:
    assert ask(_LARGE, 10, state=str(tmp_path)) == b"x" * 1_000_000


def test_a_program_that_hangs_is_ended(tmp_path: Path) -> None:
    begun = time.monotonic()
    assert ask(["sleep", "1000"], 0.1, state=str(tmp_path)) is None
    assert time.monotonic() - begun < 30


def test_a_program_that_is_not_there_has_no_answer(tmp_path: Path) -> None:
    assert ask(["/nonexistent/program"], 1, state=str(tmp_path)) is None


def test_nothing_of_our_environment_is_told(tmp_path: Path) -> None:
    assert ask(["/usr/bin/env"], 10, state=str(tmp_path)) == b""
