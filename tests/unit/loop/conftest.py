"""The tests of this room run on the shim's loop."""

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
    """Nothing is collected while the test runs but by its own calls."""
    gc.collect()
    gc.freeze()  # what earlier tests have left is not looked through by the test's own calls
    gc.disable()
    yield
    gc.enable()
