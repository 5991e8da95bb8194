"""``nvshim`` as a process, as a user or a script calls it."""

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
"""The command line of a cold start, which :func:`nvshim` avoids."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a command."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        return json.loads(self.stdout)

    @property
    def items(self) -> list[Any]:
        """Return the items of a document that is a list."""
        listed: list[Any] = self.document["items"]
        return listed


def nvshim(
    *arguments: str,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    stderr: int | None = subprocess.PIPE,
) -> Answer:
    """Run a command line until it exits.

    Args:
        arguments: the arguments of ``nvshim``.
        check: whether a non-zero status fails the test.
        env: its environment; the test's by default.
        stderr: the destination of its errors, as for ``subprocess``.
    """
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    with start_nvshim(*arguments, env=env, **options) as process:
        try:
            stdout, errors = process.communicate(timeout=200 * PATIENCE)
        finally:
            process.kill()
    assert not check or process.returncode == 0, stdout + (errors or "")
    return Answer(process.returncode, stdout, errors or "")


def start_nvshim(*arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """Start a command line.

    Args:
        arguments: the arguments of ``nvshim``.
    """
    return Warm("integration.cli", *arguments, **options)
