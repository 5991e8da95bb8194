"""Events that wait for containerd, and those of which one stands for many."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import anyio
import pytest

from api.proto import events_pb2
from integration.byhand import EventsServer
from shim.events import Publisher
from shim.log import Log

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def test_one_event_of_memory_stands_for_all_that_would_follow_it(tmp_path: Path) -> None:
    # pytest's own directory may be too long for a socket's address.
    path = os.path.relpath(tmp_path / "events")
    os.mkfifo(tmp_path / "log")
    server = EventsServer(path, "ns")
    async with anyio.create_task_group() as tasks:
        publisher = Publisher(path, "ns", tasks, Log(str(tmp_path), debug=False))
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
        # The first of a queue may be on its way when the next comes.
        assert server.of("c2") == ["TaskOOM"] * 2
        tasks.cancel_scope.cancel()
