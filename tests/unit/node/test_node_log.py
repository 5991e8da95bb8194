"""The agent's log: one line per event, and write errors have no effect."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from integration.cli.node_agent import _log

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_line_is_whole_whatever_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "log", "w", encoding="utf-8") as log:
        monkeypatch.setattr(sys, "stderr", log)
        for form in ("json", "logfmt"):
            _log(form)("warning", "no\nline, \udcff", part="x")
    structured, plain = (tmp_path / "log").read_text().splitlines()
    assert json.loads(structured)["event"] == "no\nline, \udcff"
    assert "no\\nline" in plain
    assert "part=x" in plain


def test_a_line_that_cannot_be_written_is_lost_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stderr", full)
        _log("json")("info", "serves")
    here, there = os.pipe()
    os.close(here)
    with os.fdopen(there, "w") as nobody:
        monkeypatch.setattr(sys, "stderr", nobody)
        _log("json")("info", "serves")
    monkeypatch.setattr(sys, "stderr", None)
    lowest = os.dup(0)
    os.close(lowest)
    _log("json")("info", "serves")
    os.close(lowest)  # the agent's lasting replacement for a missing stderr
