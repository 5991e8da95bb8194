"""The tests in this directory run on the shim's loop."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.harness import loop_backend


@pytest.fixture
def anyio_backend() -> str:
    loop_backend.register()
    return loop_backend.OURS


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disable the garbage collector; only the test's own calls collect."""
    gc.collect()
    gc.freeze()  # the test's own calls skip the objects of earlier tests
    gc.disable()
    yield
    gc.enable()
