"""The node that the tests of this room break."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

from tests.unit.doctor.trees import Healthy, Tree


@pytest.fixture(scope="session")
def healthy() -> Iterator[Healthy]:
    """A node with nothing wrong. Its paths are short: a socket is below them."""
    if os.geteuid() != 0:
        pytest.skip("needs root: device nodes, and a root to run programs in")
    node = Healthy(tempfile.mkdtemp(prefix="nvdoc-"))
    yield node
    node.close()


@pytest.fixture
def tree(healthy: Healthy) -> Iterator[Tree]:
    """A node of one's own."""
    made = healthy.copy()
    yield made
    made.remove("")
