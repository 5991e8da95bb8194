"""Events that wait for containerd, and events that replace several others."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import pytest
from google.protobuf.empty_pb2 import Empty

from api.proto import events_pb2, events_service_pb2
from api.ttrpc import Context
from integration.containers.shim_client import EventsServer
from shim.log import Log
from shim.loop import core
from shim.pod.events import Publisher

pytestmark = pytest.mark.anyio


async def test_one_event_of_memory_stands_for_all_that_would_follow_it(
    tmp_path: Path, open_log: Callable[..., Log]
) -> None:
    # pytest's own directory may be too long for the path of a socket.
    path = os.path.relpath(tmp_path / "events")
    os.mkfifo(tmp_path / "log")
    server = EventsServer(path, "ns")
    async with anyio.create_task_group() as tasks:
        publisher = Publisher(path, "ns", tasks, open_log())
        publisher.publish("c1", events_pb2.TaskStart(container_id="c1"))
        for container in ("c1", "c2") * 50:
            publisher.publish(container, events_pb2.TaskOOM(container_id=container))
        publisher.publish("c1", events_pb2.TaskExit(container_id="c1", id="e1"))
        for _ in range(50):
            publisher.publish("c1", events_pb2.TaskOOM(container_id="c1"))
        publisher.publish("c1", events_pb2.TaskExit(container_id="c1", id="c1"))
        await tasks.start(server.serve)
        assert await publisher.drain(10)
        assert server.of("c1") == ["TaskStart", "TaskOOM", "TaskExit e1", "TaskOOM", "TaskExit"]
        # The first event of a queue may be in flight when the next one arrives.
        assert server.of("c2") == ["TaskOOM"] * 2
        publisher.close()
        tasks.cancel_scope.cancel()


class _Faulty(socket.socket):
    """A socket with unexpected errors of the kernel or the interpreter."""

    failures: ClassVar[list[Exception]] = []
    ours = False

    def connect(self, address: Any) -> None:
        if len(self.failures) > 1:
            raise self.failures.pop()
        super().connect(address)
        self.ours = True

    def recv(self, size: int, flags: int = 0) -> bytes:
        if self.ours and self.failures:
            raise self.failures.pop()
        return super().recv(size, flags)


async def test_whatever_goes_wrong_in_a_delivery_ends_nothing_and_loses_nothing(
    tmp_path: Path, open_log: Callable[..., Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.path.relpath(tmp_path / "events")
    os.mkfifo(tmp_path / "log")
    server = EventsServer(path, "ns")
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.serve)
        monkeypatch.setattr(_Faulty, "failures", [KeyError(1), RuntimeError("it was over")])
        monkeypatch.setattr(socket, "socket", _Faulty)
        publisher = Publisher(path, "ns", tasks, open_log())
        publisher.publish("c1", events_pb2.TaskStart(container_id="c1"))
        publisher.publish("c2", events_pb2.TaskStart(container_id="c2"))
        assert publisher.waiting == 2
        assert await publisher.drain(10)
        assert not _Faulty.failures
        # An event whose answer was lost is sent again.
        assert {"TaskStart"} == {*server.of("c1")} == {*server.of("c2")}
        assert publisher.waiting == 0
        publisher.close()
        tasks.cancel_scope.cancel()


async def test_a_containerd_that_is_slow_to_answer_is_told_an_event_once(
    tmp_path: Path, open_log: Callable[..., Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.path.relpath(tmp_path / "events")
    os.mkfifo(tmp_path / "log")
    server = _Slow(path, "ns")
    skipped = 0.0
    monkeypatch.setattr(core, "now", lambda: time.monotonic() + skipped)
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.serve)
        publisher = Publisher(path, "ns", tasks, open_log())
        publisher.publish("c1", events_pb2.TaskStart(container_id="c1"))
        await server.asked.wait()
        for _ in range(50):  # half an hour, more than any timeout
            skipped += 36
            await anyio.lowlevel.checkpoint()
        server.answers.set()
        assert await publisher.drain(10)
        assert server.of("c1") == ["TaskStart"]
        publisher.close()
        tasks.cancel_scope.cancel()


class _Slow(EventsServer):
    """A containerd that answers when the test lets it."""

    def __init__(self, path: str, namespace: str) -> None:
        super().__init__(path, namespace)
        self.asked = anyio.Event()
        self.answers = anyio.Event()

    async def _forward(self, context: Context, request: events_service_pb2.ForwardRequest) -> Empty:
        done = await super()._forward(context, request)
        self.asked.set()
        await self.answers.wait()
        return done
