"""Fixtures of the tests of the verbs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.verbs.program import Program


@pytest.fixture
def program(short_path: Path) -> Iterator[Program]:
    """Install the program for one test."""
    program = Program(short_path)
    yield program
    program.close()


@pytest.fixture(autouse=True)
def _no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable fork servers: nothing would stop one that a single test leaves behind."""
    monkeypatch.setenv("NVSHIM_FORK_SERVER", "0")
