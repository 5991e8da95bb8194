"""Nodes for the engine and for commands; see tests.unit.hooks.fake_node."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.hooks.fake_node import Elves, Node


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Make a directory whose path is short enough for sockets, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="nv") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def elves(tmp_path_factory: pytest.TempPathFactory) -> Elves:
    return Elves(tmp_path_factory.mktemp("elves"))


@pytest.fixture
def bare_node(tmp_path: Path, elves: Elves) -> Node:
    return Node(tmp_path, elves)


@pytest.fixture
def node(bare_node: Node) -> Node:
    """Make a node with a driver and two GPUs."""
    bare_node.add_kernel()
    bare_node.add_driver()
    bare_node.add_gpu(0)
    bare_node.add_gpu(1)
    return bare_node
