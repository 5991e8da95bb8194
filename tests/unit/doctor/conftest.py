"""The node that the doctor's tests break."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

from tests.unit.doctor.trees import Healthy, Tree


@pytest.fixture(scope="session")
def healthy() -> Iterator[Healthy]:
    """Make a node without faults. Its path is short, because a socket is below it."""
    if os.geteuid() != 0:
        pytest.skip("needs root: device nodes, and a root to run programs in")
    node = Healthy(tempfile.mkdtemp(prefix="nvdoc-"))
    yield node
    node.close()


@pytest.fixture
def tree(healthy: Healthy) -> Iterator[Tree]:
    """Make a node that the test may change."""
    made = healthy.copy()
    yield made
    made.remove("")
