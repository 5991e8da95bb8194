"""The child processes that call NVML, and their answers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from integration.nvml import session as room
from integration.nvml.errors import ChildFailed
from integration.nvml.process import _started
from integration.nvml.session import Child, Children
from tests.harness.waiting import until

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
