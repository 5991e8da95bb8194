"""Calls about files whose file system hangs: who waits, who does not, and in which order."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import anyio
import pytest

from integration.agent_errors import FilesSilent
from integration.node import file_calls
from integration.node.file_calls import FileCalls
from tests.harness.raising import raises

pytestmark = pytest.mark.anyio


async def ended(files: FileCalls, directory: str) -> None:
    """Wait until the last call about a directory has ended."""
    call = files._calls[directory]._ended
    assert call is not None
    assert await asyncio.to_thread(call.wait, 60)


async def test_a_write_that_was_given_up_never_replaces_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_calls, "LONGEST", 0.01)
    files, path, goes_on = FileCalls(), tmp_path / "spec", threading.Event()

    def hang() -> None:
        goes_on.wait(60)
        path.write_text("old")

    silent = raises(FilesSilent, match=r"cannot write the spec.*the file system of /cdi does not")
    with silent:
        await files.run("/cdi", "to write the spec", hang)
    monkeypatch.setattr(file_calls, "LONGEST", 60)
    with raises(FilesSilent):
        await files.run("/cdi", "to write the spec", path.write_text, "new")
    assert not path.exists()
    assert await files.run("/state", "to write the checkpoint", lambda: "written") == "written"
    goes_on.set()
    await ended(files, "/cdi")
    assert path.read_text() == "old"
    await files.run("/cdi", "to write the spec", path.write_text, "new")
    assert path.read_text() == "new"


async def test_a_cancelled_call_has_ended_when_the_next_one_comes() -> None:
    files, begun, goes_on, steps = FileCalls(), anyio.Event(), threading.Event(), list[str]()
    loop = asyncio.get_running_loop()

    def write() -> None:
        loop.call_soon_threadsafe(begun.set)
        goes_on.wait(60)
        steps.append("written")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(files.run, "/state", "to write the checkpoint", write)
        await begun.wait()
        tasks.cancel_scope.cancel()
        loop.call_later(0, goes_on.set)
    await files.run("/state", "to read the checkpoint", steps.append, "read")
    assert steps == ["written", "read"]


async def test_an_error_is_that_of_the_call() -> None:
    with pytest.raises(FileNotFoundError):
        await FileCalls().run("/cdi", "to write the spec", open, "/nowhere/at/all")
