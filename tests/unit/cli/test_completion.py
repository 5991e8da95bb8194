"""Completion in a shell."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from integration.cli.health import clear
from integration.doctor.checks import CHECKS
from tests.harness.nvshim import nvshim

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pytest


def complete(*words: str) -> list[str]:
    """Return the suggestions of bash for the last word."""
    environment = {
        **os.environ,
        "_NVSHIM_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["nvshim", *words]),
        "COMP_CWORD": str(len(words)),
    }
    return [line.partition(",")[2] for line in nvshim(env=environment).stdout.split()]


def test_commands_that_are_hidden_are_not_offered() -> None:
    assert complete("node") == ["node"]
    assert complete("compl") == ["completion"]
    assert complete("ledger", "l") == []


def test_codes_of_checks_are_completed() -> None:
    short = [c.code.removeprefix("NVSHIM-") for c in CHECKS]
    assert complete("doctor", "--only", "D04") == [c for c in short if c.startswith("D04")]
    assert "NVSHIM-D001" in complete("doctor", "--skip", "NVSHIM-D0")


def test_values_of_settings_are_completed() -> None:
    assert complete("config", "set", "policy.mode", "str") == ["strict"]
    assert complete("config", "set", "policy.disable-require", "t") == ["true"]
    assert "D042" in complete("config", "set", "doctor.skip", "D04")
    assert complete("config", "set", "node.dev", "x") == []


def test_versions_that_can_be_switched_to_are_completed(tmp_path: Path) -> None:
    for name in ("0.1.0-aaaaaaaa", "0.2.0-bbbbbbbb"):
        (tmp_path / name / "bin").mkdir(parents=True)
    (tmp_path / "current").symlink_to("0.2.0-bbbbbbbb")
    words = ("install", "--prefix", str(tmp_path), "--use", "0")
    assert complete(*words) == ["0.1.0-aaaaaaaa"]


def test_devices_are_completed_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(_: object) -> Mapping[str, object]:
        return {"GPU-aa": {}, "MIG-bb": {}}

    def offered(begun: str) -> list[str]:
        (devices,) = [each for each in clear.params if each.name == "devices"]
        return [each.value for each in devices.shell_complete(click.Context(clear), begun)]

    monkeypatch.setattr("integration.cli.health.read_health", known)
    assert offered("gpu") == ["GPU-aa"]
    assert offered("") == ["GPU-aa", "MIG-bb"]
