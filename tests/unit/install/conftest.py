"""Fixtures of the tests of installations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.install_layout import InstallLayout
from tests.harness.trees import disk_of_its_own, small_tree
from tests.unit.install.nodes import Node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with disk_of_its_own(f"{tmp_path}/node") as directory:
        yield Node(
            directory,
            InstallLayout(f"{directory}/opt", f"{directory}/bin"),
            small_tree(f"{directory}/old", "1.0", more=1),
            small_tree(f"{directory}/new", "2.0", more=1),
        )
