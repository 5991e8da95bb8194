"""A container's parts that need no runtime: what Pids answers, and what an exit survives."""

from __future__ import annotations

import errno
import os
from typing import Any, cast

import anyio
import pytest

from shim import namespaces
from shim.container import Container, Surroundings
from shim.errors import WrongProcessState
from shim.log import Log
from shim.options import RuntimeOptions
from shim.pod import Pod
from shim.process import Event, State, StdioUris
from shim.reaper import Child, Exit, Reaper
from shim.stdio.logger import Logger

pytestmark = pytest.mark.anyio


class _Publisher:
    def __init__(self) -> None:
        self.events: list[str] = []

    def publish(self, _: str, event: Any) -> None:
        self.events.append(type(event).__name__)


class _FailingStdio:
    async def ended(self) -> None:
        raise OSError(errno.EMFILE, "no descriptor")


def _container(bundle: str, publisher: _Publisher, tasks: Any = None) -> Container:
    shim = Surroundings(
        namespace="n",
        reaper=Reaper(),
        publisher=cast("Any", publisher),
        tasks=tasks,
        log=Log(bundle, debug=False, shim="c", namespace="n"),
    )
    uris = StdioUris("", "", "", terminal=False)
    return Container(shim, "c", bundle, RuntimeOptions(), uris)


async def test_what_is_to_be_restored_has_an_init_without_a_pid(tmp_path: Any) -> None:
    # An error or nothing, and a containerd that comes back would delete the task.
    assert _container(str(tmp_path), _Publisher()).pids() == {0: ""}


async def test_what_is_being_deleted_is_not_restored(tmp_path: Any) -> None:
    container = _container(str(tmp_path), _Publisher())
    container._saved = cast("Any", object())
    container.init.stdio = cast("Any", _FailingStdio())
    async with container._deleting:
        with pytest.raises(WrongProcessState, match="being deleted"):
            await container.start("")


async def test_a_dead_logger_is_survived_without_a_descriptor(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> int:
        raise OSError(errno.EMFILE, "no descriptor")

    log = Log(str(tmp_path), debug=False, shim="c", namespace="n")
    child = Child(4_000_000)
    child._finish(Exit(child.pid, 1, 1))
    pipes = [*os.pipe(), *os.pipe()]
    async with anyio.create_task_group() as tasks:
        logger = Logger(tasks, log, "logger", child, pipes)
        monkeypatch.setattr(os, "dup", refuse)
        logger.watch()
    logger.close()


async def test_an_exit_is_told_though_its_output_fails(tmp_path: Any) -> None:
    publisher = _Publisher()
    async with anyio.create_task_group() as tasks:
        container = _container(str(tmp_path), publisher, tasks)
        child = Child(4_000_000)
        child._finish(Exit(child.pid, 3, 1))
        container.init.child = child
        container.init.stdio = cast("Any", _FailingStdio())
        container.init.advance(Event.STARTED)
        container.watch_init()
    assert publisher.events == ["TaskExit"]
    assert container.init.state is State.STOPPED


async def test_namespaces_that_cannot_be_forked_leave_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "no process")

    monkeypatch.setattr(os, "fork", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(BlockingIOError):
        await namespaces.hold(Reaper(), Pod())
    assert len(os.listdir("/proc/self/fd")) == len(before)
