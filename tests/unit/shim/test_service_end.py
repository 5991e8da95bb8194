"""A shim without tasks exits by itself if containerd does not shut it down."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from shim import sockets
from shim.pod import service

pytestmark = pytest.mark.anyio


class _Publisher:
    waiting = 0


class _Shim:
    """The part of a shim's context on which its exit depends."""

    def __init__(self) -> None:
        self.publisher = _Publisher()
        self.sandbox: object = None
        self.tasks: object = None


class _Node:
    """A shim on a socket."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "socket")
        self.listener = sockets.listen(self.path)
        self.shim = _Shim()
        self.ended = anyio.Event()
        own = service.OwnSocket(self.path, sockets.identity(self.path))
        self.lifetime = service.Lifetime(cast("Any", self.shim), own, {}, self.ended.set)

    async def ends_within(self, seconds: float) -> bool:
        async with anyio.create_task_group() as tasks:
            self.shim.tasks = tasks
            tasks.start_soon(self.lifetime.end_when_unused)
            with anyio.move_on_after(seconds):
                await self.ended.wait()
            tasks.cancel_scope.cancel()
        return self.ended.is_set()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(service, "UNUSED", 0.05)
    node = _Node(tmp_path)
    yield node
    assert node.listener is not None
    os.close(node.listener)


async def test_a_shim_to_which_nobody_came_ends_and_its_socket_is_gone(node: _Node) -> None:
    assert await node.ends_within(5)
    assert not os.path.lexists(node.path)


async def test_it_stays_while_there_is_something_to_tell(node: _Node) -> None:
    node.shim.publisher.waiting = 1
    assert not await node.ends_within(0.3)
    node.shim.publisher.waiting = 0
    assert await node.ends_within(5)


async def test_but_not_for_ever(node: _Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "UNHEARD", 0.2)
    node.shim.publisher.waiting = 1
    assert await node.ends_within(5)


async def test_it_stays_while_a_container_is_announced(node: _Node, tmp_path: Path) -> None:
    assert sockets.listen(node.path, container_id="c1", bundle_path=str(tmp_path)) is None
    assert not await node.ends_within(0.3)
    sockets.forget(node.path, "c1")
    assert await node.ends_within(5)


async def test_one_that_was_kept_by_who_looked_for_another_ends_soon(
    node: _Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "UNUSED", 3600)
    async with anyio.create_task_group() as tasks:
        node.shim.tasks = tasks
        with sockets._Lock(node.path):
            node.lifetime.end_when_empty("pod")
            await anyio.sleep(0.3)
            assert not node.ended.is_set()
        with anyio.fail_after(20):
            await node.ended.wait()
        tasks.cancel_scope.cancel()


async def test_it_stays_while_it_holds_a_sandbox(node: _Node) -> None:
    node.shim.sandbox = object()
    assert not await node.ends_within(0.3)
    node.shim.sandbox = None
    node.lifetime.end_when_empty("pod")
    assert node.lifetime.ending
