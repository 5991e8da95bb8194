"""A node for commands, and the output of commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integration import exits
from integration.cli import app
from tests.unit.hooks.fake_node import Node


@dataclass(frozen=True)
class Said:
    """The output of a command."""

    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Nvshim = Callable[..., Said]


@pytest.fixture(autouse=True)
def _no_podman_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integration.engines.podman._PODMAN", "no-podman")


@pytest.fixture
def nvshim(capsys: pytest.CaptureFixture[str]) -> Nvshim:
    """Run a command, and check its exit status."""

    def run(*words: str, ends: int = exits.OK) -> Said:
        capsys.readouterr()
        status = app.main([*words])
        seen = capsys.readouterr()
        assert status == ends, seen.err
        return Said(seen.out, seen.err)

    return run


@pytest.fixture
def config_file(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the node's configuration, which every command finds."""
    path = tmp_path / "config.toml"
    roots = {"driver-root": node.driver, "dev": node.dev, "proc": node.proc, "sys": node.sys}
    lines = [f'{key} = "{value}"\n' for key, value in roots.items()]
    specs = f'[cdi]\nspec-dirs = ["{tmp_path}/etc-cdi", "{tmp_path}/run-cdi"]\n'
    path.write_text(f'[node]\nstate = "{node.config.state}"\n{"".join(lines)}{specs}')
    monkeypatch.setenv("NVSHIM_CONFIG", str(path))
    return path
