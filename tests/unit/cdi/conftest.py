"""The configuration of a node that commands look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.hooks.fake_node import Node


@pytest.fixture
def config_file(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The node's configuration, which every command finds."""
    path = tmp_path / "config.toml"
    roots = {"driver-root": node.driver, "dev": node.dev, "proc": node.proc, "sys": node.sys}
    lines = [f'{key} = "{value}"\n' for key, value in roots.items()]
    specs = f'[cdi]\nspec-dirs = ["{tmp_path}/etc-cdi", "{tmp_path}/run-cdi"]\n'
    path.write_text(f'[node]\nstate = "{node.config.state}"\n{"".join(lines)}{specs}')
    monkeypatch.setenv("NVSHIM_CONFIG", str(path))
    return path
