"""The child processes that call NVML, and their answers."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from integration.node.services.monitor.events import Watch
from integration.node.state.store import State
from integration.nvml import session as room
from integration.nvml.errors import ChildFailed
from integration.nvml.process import _started
from integration.nvml.session import Child, Children
from integration.nvml.snapshot import NodeSnapshot
from tests.harness.node_state import publish
from tests.harness.waiting import until
from tests.unit.node.inventories import inventory, node_with

pytestmark = pytest.mark.anyio


def running(script: str) -> subprocess.Popen[bytes]:
    line, pipe = [sys.executable, "-S", "-c", script], subprocess.PIPE
    return subprocess.Popen(line, stdin=pipe, stdout=pipe, bufsize=0)


def child_of(process: subprocess.Popen[bytes]) -> Child:
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as to, process.stdout as from_:
        ends = os.dup(to.fileno()), os.dup(from_.fileno())
        return Child("samples", _started(process), *ends)


async def test_a_driver_that_holds_children_is_given_no_more_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "_MOST_ABANDONED", 1)
    monkeypatch.setattr(room, "TO_DIE", 0.01)
    children = Children(lambda *_, **__: None, "/nowhere")
    process = running("import time; time.sleep(60)")
    child = child_of(process)
    monkeypatch.setattr(child.process, "kill", lambda: None)  # as if signals did not reach it
    try:
        await children.end(child)
        with pytest.raises(ChildFailed, match="holds 1 earlier processes"):
            children.start("samples", "/nowhere/libnvidia-ml.so.1")
    finally:
        process.kill()
        await until(lambda: not children.abandoned, "it has ended")
    monkeypatch.undo()
    child = children.start("samples", "/nowhere/libnvidia-ml.so.1")  # it exits by itself
    await children.end(child)


async def test_how_one_ended_is_told_though_it_lets_go_of_its_pipes_before() -> None:
    process = running("import os, time; os.close(1); os.close(0); time.sleep(0.3); os.abort()")
    child = child_of(process)
    try:
        with pytest.raises(ChildFailed, match="NVML crashed: SIGABRT"):
            await child.answer(20)
        child.ask({})
        with pytest.raises(ChildFailed, match="NVML crashed: SIGABRT"):
            await child.answer(20)
    finally:
        child.close()
        process.kill()
        process.wait()


class Ending:
    """Children whose first one fails; the driver is replaced while that one is ended."""

    def __init__(self, state: State) -> None:
        self.state, self.started = state, list[str]()

    def start(self, _task: str, library: str) -> Any:
        self.started.append(library)
        return SimpleNamespace(ask=lambda _: None, answer=self.answer)

    async def answer(self, _seconds: float) -> dict[str, Any]:
        if len(self.started) > 1:
            await anyio.sleep_forever()
        raise ChildFailed("events of NVML", found="NVML crashed: SIGSEGV")

    async def end(self, _child: Any) -> None:
        publish(self.state.node, of_driver("550.54.15"))


def of_driver(version: str) -> NodeSnapshot:
    name = "libnvidia-ml.so.{v}"
    library = SimpleNamespace(row=name, source=f"/lib/{name.format(v=version)}", arch=None)
    driver = SimpleNamespace(version=version, libraries=(library,), arch=None)
    return NodeSnapshot(inventory=node_with(*inventory().gpus, driver=cast("Any", driver)))


async def test_a_driver_that_comes_while_a_child_is_ended_gets_its_child_at_once() -> None:
    state = State()
    publish(state.node, of_driver("535.104.05"))
    children = Ending(state)
    watch = Watch(state, cast("Any", children), lambda _: None, lambda *_, **__: None, to_answer=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.keep)
        await anyio.wait_all_tasks_blocked()
        assert children.started == [
            "/lib/libnvidia-ml.so.535.104.05", "/lib/libnvidia-ml.so.550.54.15",
        ]  # fmt: skip
        tasks.cancel_scope.cancel()
