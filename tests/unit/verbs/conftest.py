"""What the tests of the verbs share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.verbs.program import Program


@pytest.fixture
def program(short_path: Path) -> Iterator[Program]:
    """The program, installed for one test."""
    program = Program(short_path)
    yield program
    program.close()


@pytest.fixture(autouse=True)
def _no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would end one that is left behind for a single test."""
    monkeypatch.setenv("NVSHIM_FORK_SERVER", "0")
