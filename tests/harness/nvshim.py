"""``nvshim`` as a process, as a person or a script calls it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from integration.timeouts import PATIENCE
from tests.harness.warm import PROGRAM, Warm

__all__ = ["NVSHIM", "Answer", "nvshim", "start_nvshim"]

NVSHIM = (*PROGRAM, "integration.cli")
"""The command line of a program that is started cold, which :func:`nvshim` spares."""


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


def nvshim(
    *arguments: str,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    stderr: int | None = subprocess.PIPE,
) -> Answer:
    """Run a command line to its end.

    Args:
        arguments: what follows ``nvshim``.
        check: whether another status than 0 fails the test.
        env: its environment; the test's by default.
        stderr: where its errors go, as ``subprocess`` has it.
    """
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    with start_nvshim(*arguments, env=env, **options) as process:
        try:
            stdout, errors = process.communicate(timeout=60 * PATIENCE)
        finally:
            process.kill()
    assert not check or process.returncode == 0, stdout + (errors or "")
    return Answer(process.returncode, stdout, errors or "")


def start_nvshim(*arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """Start a command line.

    Args:
        arguments: what follows ``nvshim``.
    """
    return Warm("integration.cli", *arguments, **options)
