"""Nodes for the commands to look at; see tests.unit.hooks.fake_node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.hooks.fake_node import Elves, Node

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def elves(tmp_path_factory: pytest.TempPathFactory) -> Elves:
    return Elves(tmp_path_factory.mktemp("elves"))


@pytest.fixture
def bare_node(tmp_path: Path, elves: Elves) -> Node:
    return Node(tmp_path, elves)


@pytest.fixture
def node(bare_node: Node) -> Node:
    """A node with a driver and two GPUs."""
    bare_node.add_kernel()
    bare_node.add_driver()
    bare_node.add_gpu(0)
    bare_node.add_gpu(1)
    return bare_node


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
