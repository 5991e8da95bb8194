"""Query the kubelet's allocations by PodResources, over one connection."""

from __future__ import annotations

import os
import threading
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self

import anyio
import anyio.to_thread
import grpc  # type: ignore[import-untyped] # it ships no types
import pytest

from api.proto import deviceplugin_pb2, podresources_pb2
from integration.kubelet.pod_resources import PodResources
from tests.harness.grpc_server import serve
from tests.harness.kubelet_plugins import Assignment, KubeletPlugins
from tests.harness.processes import connections_to

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from integration.kubelet.values import Allocated

pytestmark = pytest.mark.anyio


class Lister:
    """A server with only the PodResources API. It runs while the context is open."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.asked_by: list[set[str]] = []
        """The connections that were open at each call."""
        self.refusals: list[grpc.StatusCode] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.asked = threading.Event()
        self._server: Any = None

    def __enter__(self) -> Self:
        method = (self._list, podresources_pb2.ListPodResourcesRequest)
        self._server = serve(self.path, "v1.PodResourcesLister", {"List": method})
        return self

    def __exit__(self, *_: object) -> None:
        self.goes_on.set()
        self._server.stop()

    def _list(self, _request: Any, context: Any) -> podresources_pb2.ListPodResourcesResponse:
        self.asked_by.append(connections_to(self.path))
        self.asked.set()
        self.goes_on.wait(60)
        if self.refusals:
            context.abort(self.refusals.pop(), "not now")
        pod = podresources_pb2.PodResources(namespace="team", name="web")
        return podresources_pb2.ListPodResourcesResponse(pod_resources=[pod])


KNOWN: Allocated = {("team", "web"): {}}


@pytest.fixture
def lister(tmp_path: Path) -> Iterator[Lister]:
    with Lister(str(tmp_path / "kubelet.sock")) as lister:
        yield lister


@pytest.fixture
async def kubelet() -> AsyncIterator[PodResources]:
    async with aclosing(PodResources()) as kubelet:
        yield kubelet


async def test_the_kubelet_is_asked_and_need_not_answer(
    tmp_path: Path, kubelet: PodResources
) -> None:
    socket = str(tmp_path / "resources.sock")
    assert await kubelet.allocated(socket) is None
    assert await kubelet.allocated("") is None
    with KubeletPlugins(str(tmp_path / "plugins"), pod_resources=socket) as there:
        there.assignments.append(
            Assignment("web", "team", "server", "nvidia.com/gpu", ("GPU-a::0", "GPU-b::1"),
                       deviceplugin_pb2.ContainerAllocateResponse())
        )  # fmt: skip
        found = await kubelet.allocated(socket)
    both = (("nvidia.com/gpu", "GPU-a::0"), ("nvidia.com/gpu", "GPU-b::1"))
    assert found == {("team", "web"): {"server": both}}
    assert await kubelet.allocated(socket) is None
    if not os.path.lexists(socket):
        (tmp_path / "resources.sock").write_text("")
    assert await kubelet.allocated(socket) is None


async def test_one_connection_is_kept_until_the_kubelet_is_another(
    lister: Lister, kubelet: PodResources
) -> None:
    for _ in range(5):
        assert await kubelet.allocated(lister.path) == KNOWN
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(kubelet.allocated, lister.path)
    assert len(lister.asked_by) == 10
    assert len(set.union(*lister.asked_by)) == 1
    lister.__exit__()
    with Lister(lister.path) as another:
        assert await kubelet.allocated(lister.path) == KNOWN
        assert len(another.asked_by) == 1
    assert len(lister.asked_by) == 10


async def test_a_kubelet_that_is_unavailable_once_is_asked_again(
    lister: Lister, kubelet: PodResources
) -> None:
    assert await kubelet.allocated(lister.path) == KNOWN
    lister.refusals = [grpc.StatusCode.UNAVAILABLE]
    assert await kubelet.allocated(lister.path) == KNOWN
    first, again, anew = lister.asked_by
    assert first == again
    assert anew - first
    lister.refusals = [grpc.StatusCode.UNAVAILABLE] * 2
    assert await kubelet.allocated(lister.path) is None
    assert lister.refusals == []
    # A method that it refuses is not called again.
    lister.refusals = [grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert await kubelet.allocated(lister.path) is None
    assert await kubelet.allocated(lister.path) == KNOWN


async def test_a_kubelet_that_is_slow_is_not_waited_for_and_is_asked_by_the_same_connection(
    lister: Lister, kubelet: PodResources
) -> None:
    assert await kubelet.allocated(lister.path) == KNOWN
    lister.goes_on.clear()
    assert await kubelet.allocated(lister.path, 0.1) is None
    lister.goes_on.set()
    assert await kubelet.allocated(lister.path) == KNOWN
    assert len(set.union(*lister.asked_by)) == 1


async def test_who_asks_while_the_connection_is_replaced_is_answered(
    lister: Lister, kubelet: PodResources
) -> None:
    lister.goes_on.clear()
    found: list[Allocated | None] = []

    async def ask() -> None:
        found.append(await kubelet.allocated(lister.path))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.to_thread.run_sync(lister.asked.wait)
        os.rename(lister.path, f"{lister.path}.old")
        with Lister(lister.path) as another:
            tasks.start_soon(ask)
            while len(found) < 2:  # noqa: ASYNC110 - they wait for each other, at most two seconds
                await anyio.sleep(0.01)
            assert found == [KNOWN, KNOWN]
            assert len(another.asked_by) == 2


async def test_an_answer_that_is_no_message_is_none(kubelet: PodResources, tmp_path: Path) -> None:
    path = str(tmp_path / "garbage.sock")
    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(_answer_garbage)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("v1.PodResourcesLister", {"List": method}),)
    )
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        assert await kubelet.allocated(path, timeout=30) is None
        assert await kubelet.claims(path, timeout=30) is None
    finally:
        await server.stop(None)


async def _answer_garbage(_request: bytes, _context: Any) -> bytes:
    return b"\xff\xff\xff"
