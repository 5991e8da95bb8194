"""``nvshim`` as a process, as a person or a script calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from integration.timeouts import PATIENCE
from tests.harness.launcher import REPOSITORY


@dataclass(frozen=True, slots=True)
class Answer:
    """How it ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        return json.loads(self.stdout)

    @property
    def items(self) -> list[Any]:
        """What a document of many things lists."""
        listed: list[Any] = self.document["items"]
        return listed


def nvshim(*arguments: str, check: bool = True) -> Answer:
    """Run a command line to its end.

    Args:
        arguments: what follows ``nvshim``.
        check: whether another status than 0 fails the test.
    """
    done = subprocess.run(
        [sys.executable, "-m", "integration.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
        check=False,
        cwd=REPOSITORY,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return Answer(done.returncode, done.stdout, done.stderr)
