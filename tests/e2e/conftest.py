"""What tests of a shim without containerd share."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from integration.containerd_errors import CriuUnusable
from integration.criu import find_criu
from integration.simulated import Scenario, SimulatedNode
from tests.harness.node import node_of
from tests.harness.shim import shim_by_hand

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from contextlib import AbstractAsyncContextManager

    from integration.parts import Parts
    from tests.harness.node import Node
    from tests.harness.shim import ShimByHand

    StartShim = Callable[..., AbstractAsyncContextManager[ShimByHand]]


@pytest.fixture
def start_shim(shim_directory: str, parts: Parts) -> StartShim:
    """Start a shim for a first container; all of it is removed at the end."""
    launcher = os.path.join(shim_directory, "containerd-shim-nvidia-v1")

    @asynccontextmanager
    async def start(first: str, *args: str, **more: Any) -> AsyncIterator[ShimByHand]:
        async with shim_by_hand(launcher, first, *args, **more) as shim:
            yield shim

    return start


@pytest.fixture(scope="session")
def criu() -> str:
    """A CRIU that works with this kernel."""
    try:
        return find_criu()
    except CriuUnusable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def two_gpus(workshop: str) -> Iterator[SimulatedNode]:
    """A simulated node with two GPUs, for tests that leave it as it is."""
    with SimulatedNode.create(f"{workshop}/two", Scenario.load("two")) as node:
        yield node


@pytest.fixture
async def node(shim_directory: str) -> AsyncIterator[Node]:
    """A containerd's place on a machine, with the fork server that the first start leaves."""
    async with node_of(os.path.join(shim_directory, "containerd-shim-nvidia-v1")) as node:
        yield node
