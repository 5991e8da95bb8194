"""Fixtures for tests of a shim without containerd."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from integration.errors import IntegrationError
from integration.simulated import Scenario, SimulatedNode
from integration.tree import MANIFEST
from tests.harness.launcher import launcher_with
from tests.harness.node import Node, node_of
from tests.harness.raising import is_error
from tests.harness.runtime import Runtime, is_alive
from tests.harness.sandbox import SandboxByHand, StartPod
from tests.harness.shim import ShimByHand, StartShim, shim_by_hand
from tests.harness.waiting import eventually
from tools.criu import find_criu
from tools.errors import CriuUnusable
from tools.parts import Parts


@pytest.fixture
def start_shim(
    shim_directory: str, parts: Parts, request: pytest.FixtureRequest, tmp_path: Path
) -> StartShim:
    """Start a shim for its first container.

    The shim stops with the block, unless the block has stopped it. Its containers are killed and
    deleted in any state, and nothing may be left. With the marker ``constants`` it has other
    constants, except the shim of a tree.
    """
    launcher = os.path.join(shim_directory, "containerd-shim-nvidia-v1")
    marker = request.node.get_closest_marker("constants")
    is_tree = os.path.exists(os.path.join(os.path.dirname(shim_directory), MANIFEST))
    if marker is not None and not is_tree:
        launcher = launcher_with(marker.args[0], launcher, str(tmp_path / "launcher"))

    @asynccontextmanager
    async def start(first: str, *args: str, **more: Any) -> AsyncIterator[ShimByHand]:
        async with shim_by_hand(launcher, first, *args, **more) as shim:
            yield shim
            if is_alive(shim.pid) and not shim.client.closed and not more.get("sandbox"):
                await shim.finish()

    return start


@pytest.fixture
async def shim(start_shim: StartShim) -> AsyncIterator[ShimByHand]:
    """Return a shim started for c1, whose program would sleep."""
    async with start_shim("c1", "sleep", "1000") as shim:
        yield shim


@pytest.fixture
def start_pod(start_shim: StartShim) -> StartPod:
    """Start a shim for a sandbox, and the sandbox; both stop with the block and leave nothing."""

    @asynccontextmanager
    async def start(
        environment: dict[str, str] | None = None, **config: Any
    ) -> AsyncIterator[SandboxByHand]:
        async with start_shim("pod", sandbox=True, bootstrap=True, environment=environment) as shim:
            pod = SandboxByHand(shim)
            try:
                await pod.start(**config)
                yield pod
                if is_alive(shim.pid):
                    await pod.gone()
            finally:
                if pod.pid and is_alive(pod.pid):
                    with suppress(ProcessLookupError):
                        pod.kill_holder()

    return start


@pytest.fixture
async def pod(start_pod: StartPod) -> AsyncIterator[SandboxByHand]:
    """Return a running sandbox with default settings."""
    async with start_pod() as pod:
        yield pod


@pytest.fixture
async def new_pod(start_shim: StartShim) -> AsyncIterator[SandboxByHand]:
    """Return a sandbox that is not created yet."""
    async with start_shim("pod", sandbox=True) as shim:
        pod = SandboxByHand(shim)
        yield pod
        await pod.gone()


@pytest.fixture
def node_namespaces() -> dict[str, str]:
    return {name: os.readlink(f"/proc/self/ns/{name}") for name in ("net", "ipc", "uts", "pid")}


@pytest.fixture
def other_network() -> Iterator[str]:
    """Return the path of a new network namespace."""
    node = os.readlink("/proc/self/ns/net")
    with subprocess.Popen(["unshare", "--net", "sleep", "1000"]) as holder:
        path = f"/proc/{holder.pid}/ns/net"
        try:
            eventually(lambda: os.readlink(path) != node, "unshare made a namespace")
            yield path
        finally:
            holder.kill()


@pytest.fixture
def by_paths(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a shim that names namespaces by paths instead of a process."""
    config = tmp_path / "config.toml"
    config.write_text('[sandbox]\nnamespaces = "paths"\n')
    return {"NVSHIM_CONFIG": str(config)}


@pytest.fixture(scope="session")
def criu() -> str:
    """Return a CRIU that works with this kernel."""
    try:
        return find_criu()
    except IntegrationError as error:
        assert is_error(error, CriuUnusable)  # noqa: PT017 - no test of its own
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def two_gpus(workshop: str) -> Iterator[SimulatedNode]:
    """A simulated node with two GPUs, for tests that leave it as it is."""
    with SimulatedNode.create(f"{workshop}/two", Scenario.load("two")) as node:
        yield node


@pytest.fixture(scope="session")
def mig_gpus(workshop: str) -> Iterator[SimulatedNode]:
    """Return a shared node with MIG devices and every other device NVIDIA's driver can have."""
    with SimulatedNode.create(f"{workshop}/mig", Scenario.load("mig")) as node:
        yield node


@pytest.fixture(scope="session")
def full_gpus(workshop: str) -> Iterator[SimulatedNode]:
    """Return a node with GPUs and every optional device."""
    with SimulatedNode.create(f"{workshop}/full", Scenario.load("full")) as node:
        yield node


@pytest.fixture
def own_gpus(tmp_path: Path) -> Iterator[SimulatedNode]:
    """Return a simulated node with two GPUs that the test may change."""
    with SimulatedNode.create(str(tmp_path / "node"), Scenario.load("two")) as node:
        yield node


@pytest.fixture
def ours(runtime: Runtime) -> Runtime:
    """Return the runtime under test, if it is ours."""
    if not runtime.is_ours:
        pytest.skip("containerd's own shim knows nothing of GPUs")
    return runtime


@pytest.fixture
def gpus(ours: Runtime, two_gpus: SimulatedNode, configure: Callable[..., None]) -> Runtime:
    """Return the runtime on the node with two GPUs."""
    configure(node=two_gpus)
    return ours


@pytest.fixture
async def node(shim_directory: str) -> AsyncIterator[Node]:
    """Return a containerd's directories, with the fork server that the first start leaves."""
    async with node_of(os.path.join(shim_directory, "containerd-shim-nvidia-v1")) as node:
        yield node
