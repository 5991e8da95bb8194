"""On which loops the tests of this room run: what holds of ours has to hold of a program's."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

from tests.harness import aio_backend

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=["asyncio", aio_backend.OURS])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    aio_backend.register()
    return str(request.param)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Nothing is collected while the test runs but by its own calls."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
