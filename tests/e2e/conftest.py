"""What tests of a shim without containerd share."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from integration.simulated import Scenario, SimulatedNode
from tests.harness.node import Node, node_of
from tests.harness.runtime import Runtime
from tests.harness.shim import ShimByHand, StartShim, shim_by_hand
from tests.tools.criu import find_criu
from tests.tools.errors import CriuUnusable
from tests.tools.parts import Parts


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


@pytest.fixture(scope="session")
def mig_gpus(workshop: str) -> Iterator[SimulatedNode]:
    """One with MIG devices, and with whatever else NVIDIA's driver can have nodes for; likewise."""
    with SimulatedNode.create(f"{workshop}/mig", Scenario.load("mig")) as node:
        yield node


@pytest.fixture(scope="session")
def full_gpus(workshop: str) -> Iterator[SimulatedNode]:
    """One with GPUs and everything that there is beside them; likewise."""
    with SimulatedNode.create(f"{workshop}/full", Scenario.load("full")) as node:
        yield node


@pytest.fixture
def own_gpus(tmp_path: Path) -> Iterator[SimulatedNode]:
    """A simulated node with two GPUs, which is the test's to change."""
    with SimulatedNode.create(str(tmp_path / "node"), Scenario.load("two")) as node:
        yield node


@pytest.fixture
def ours(runtime: Runtime) -> Runtime:
    """The runtime under test, where it is ours."""
    if not runtime.is_ours:
        pytest.skip("containerd's own shim knows nothing of GPUs")
    return runtime


@pytest.fixture
def gpus(ours: Runtime, two_gpus: SimulatedNode, configure: Callable[..., None]) -> Runtime:
    """The runtime on the node with two GPUs."""
    configure(node=two_gpus)
    return ours


@pytest.fixture
async def node(shim_directory: str) -> AsyncIterator[Node]:
    """A containerd's place on a machine, with the fork server that the first start leaves."""
    async with node_of(os.path.join(shim_directory, "containerd-shim-nvidia-v1")) as node:
        yield node
