"""Checks beyond the tests: each is a make target, and a failure does not stop the others."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

import pytest

from tests import more
from tests.harness.launcher import REPOSITORY


def test_every_check_is_a_target() -> None:
    with open(os.path.join(REPOSITORY, "Makefile"), encoding="utf-8") as file:
        targets = set(re.findall(r"(?m)^([a-z-]+):", file.read()))
    assert set(more.CHECKS.values()) <= targets


def test_all_that_was_asked_for_runs_and_is_in_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(argv: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert "ONLY=" in argv  # which would choose among the target's own checks
        ran.append(argv[-1])
        return subprocess.CompletedProcess(argv, 2 if argv[-1] == "fuzz" else 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert more.main(["--only", "soak,fuzz,vm"]) == 1
    assert ran == ["test-vm", "fuzz", "soak"]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [row[:3] for row in rows] == [
        ["vm", "test-vm", "passed"], ["fuzz", "fuzz", "failed"], ["soak", "soak", "passed"],
    ]  # fmt: skip
    assert more.main(["--only", "vm"]) == 0
    with pytest.raises(SystemExit):
        more.main(["--only", "vm,nothing"])
