"""The systemd units that start the agent, and those that it replaces."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING, Final

import click
import pytest

from integration.cli.app import nvshim
from integration.node.refresh import MARK_OF_UNIT
from tests.harness.launcher import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

UNITS: Final = os.path.join(REPOSITORY, "integration", "systemd")
AGENT: Final = "nvshim-node.service"
REFRESH: Final = "nvshim-cdi-refresh.service"
_PROGRAM: Final = "/usr/local/bin/nvshim"


def _values(unit: str, key: str) -> list[str]:
    """Return a key's values in a unit, as systemd passes them to a program."""
    with open(os.path.join(UNITS, unit), encoding="utf-8") as file:
        found = re.findall(rf"^{key}=-?(.*)$", file.read(), re.MULTILINE)
    return [value.replace("$$", "$") for value in found]


def _shell(line: str, **environment: str) -> int:
    words = shlex.split(line)
    return subprocess.run(words, env={**os.environ, **environment}, check=False).returncode


def test_the_agents_unit_starts_a_command_that_is_one() -> None:
    (line,) = _values(AGENT, "ExecStart")
    program, name, *words = shlex.split(line)
    assert (program, words) == (_PROGRAM, ["$OPTIONS"])
    command = nvshim.get_command(click.Context(nvshim), name)
    assert command is not None
    command.make_context(name, [])
    # It shares the node's mount namespace, and its mounts are visible there.
    with open(os.path.join(UNITS, AGENT), encoding="utf-8") as file:
        keys = re.findall(r"^(\w+)=", file.read(), re.MULTILINE)
    assert not [key for key in keys if re.match(r"(Protect|Private|Read\w+Paths|Mount|Root)", key)]


def test_what_the_other_unit_has_written_is_known_as_ours(tmp_path: Path) -> None:
    (line,) = _values(REFRESH, "ExecStartPost")
    for name, marked in (("nvidia.yaml", True), ("nvidia.json", False)):
        spec = tmp_path / name
        spec.write_bytes(b"---\nkind: nvidia.com/gpu\n")
        assert _shell(line, NVIDIA_CTK_CDI_OUTPUT_FILE_PATH=str(spec)) == 0
        assert (
            spec.read_bytes() == (MARK_OF_UNIT if marked else b"") + b"---\nkind: nvidia.com/gpu\n"
        )


def test_the_other_unit_does_nothing_where_an_agent_is_or_is_to_be(tmp_path: Path) -> None:
    _, enabled, ready = _values(REFRESH, "ExecCondition")
    for name, line in (("systemctl", enabled), ("nvshim", ready.replace(_PROGRAM, "nvshim"))):
        program = tmp_path / name
        for status, goes_on in ((0, False), (1, True), (3, True)):
            program.write_text(f"#!/bin/sh\nexit {status}\n")
            program.chmod(0o755)
            path = f"{tmp_path}:{os.environ['PATH']}"
            assert (_shell(line, PATH=path) == 0) is goes_on, (line, status)


def test_systemd_understands_the_units(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("needs systemd-analyze")
    for name in (AGENT, REFRESH):
        with open(os.path.join(UNITS, name), encoding="utf-8") as file:
            (tmp_path / name).write_text(file.read().replace(_PROGRAM, "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, tmp_path.glob("nvshim-*"))],
        capture_output=True, text=True, check=False,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
