"""The kernel's preparation for moves between cgroups, and the calls that ask for it."""

from __future__ import annotations

import os
import sys
from _thread import start_new_thread
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from api.proto import task_pb2
from shim.cgroup import cgroup, moves
from shim.cgroup.moves import ExpectedMoves
from shim.children import Child, Reaper
from shim.context import ShimContext
from shim.errors import RuntimeFailed
from shim.log import Log
from shim.pod.container import Container
from shim.pod.process import Event
from shim.runtime.options import RuntimeOptions
from shim.runtime.runtime import LowLevelRuntime
from shim.stdio.uris import StdioUris
from tests.harness.raising import raises
from tests.harness.waiting import eventually


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def _own_cgroups() -> str:
    return Path("/proc/thread-self/cgroup").read_text()


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the errors of threads."""
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    return seen


def _expect_and_wait(expected: ExpectedMoves) -> None:
    before = _threads()
    expected.expect()
    eventually(lambda: _threads() <= before, "the thread has ended")


def test_a_caller_does_not_wait_for_the_kernel_and_late_calls_share_one_more_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cgroup.threads"
    os.mkfifo(file)  # without a reader it makes the writer wait, like the kernel
    monkeypatch.setattr(cgroup, "threads_file", lambda: str(file))
    before = _threads()
    expected = ExpectedMoves()
    expected.expect()
    eventually(lambda: not expected._expected, "the thread does what was asked for")
    for _ in range(3):
        expected.expect()
    (thread,) = _threads() - before
    reading = os.open(file, os.O_RDONLY)
    try:
        eventually(lambda: _threads() == before, "the thread has ended")
        assert os.read(reading, 100).decode() == thread * 2
    finally:
        os.close(reading)


def test_a_later_call_moves_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cgroup.threads"
    file.touch()
    monkeypatch.setattr(cgroup, "threads_file", lambda: str(file))
    expected = ExpectedMoves()
    for _ in range(2):
        file.write_bytes(b"")
        _expect_and_wait(expected)
        assert file.read_text().isdigit()


def test_what_the_real_kernel_is_told_moves_nothing(errors: list[Any]) -> None:
    before = _own_cgroups()
    path = cgroup.threads_file()
    assert path is not None
    _expect_and_wait(ExpectedMoves())
    moves._stay(path)
    assert _own_cgroups() == before
    assert errors == []


def test_a_thread_is_not_taken_to_the_cgroup_that_its_process_has_just_left(
    unified: str,
) -> None:
    before = _own_cgroups()
    with pytest.raises(OSError, match="not supported"):
        moves._stay(f"{unified}/cgroup.threads")
    assert _own_cgroups() == before


@pytest.mark.parametrize("file", [None, "/nowhere/cgroup.threads", "/proc/version"])
def test_cgroups_that_cannot_be_written_are_no_error(
    monkeypatch: pytest.MonkeyPatch, errors: list[Any], file: str | None
) -> None:
    monkeypatch.setattr(cgroup, "threads_file", lambda: file)
    _expect_and_wait(ExpectedMoves())
    assert errors == []


def test_a_call_without_a_thread_is_no_error_and_the_next_one_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cgroup.threads"
    file.touch()
    monkeypatch.setattr(cgroup, "threads_file", lambda: str(file))
    scarce = [True]

    def start(*arguments: Any) -> None:
        if scarce.pop():
            raise RuntimeError("can't start new thread")
        start_new_thread(*arguments)

    expected = ExpectedMoves(start)
    expected.expect()
    scarce.append(False)
    _expect_and_wait(expected)
    assert file.read_text().isdigit()


@pytest.mark.anyio
async def test_the_kernel_is_told_before_a_runtime_makes_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once when a Create arrives, since what precedes the runtime may be short, or long."""
    done: list[str] = []

    def note(what: str) -> Any:
        async def call(*_: object, **__: object) -> None:
            done.append(what)
            raise RuntimeFailed(what, found="nothing")

        return call

    monkeypatch.setattr(LowLevelRuntime, "create", note("create"))
    monkeypatch.setattr(LowLevelRuntime, "execute", note("exec"))
    bundle = str(tmp_path)
    (tmp_path / "rootfs").mkdir()
    (tmp_path / "config.json").write_text(
        '{"ociVersion": "1.0.2", "root": {"path": "rootfs"}, '
        '"process": {"args": ["true"], "cwd": "/"}}'
    )
    context = ShimContext(
        namespace="n",
        reaper=Reaper(),
        publisher=cast("Any", None),
        tasks=cast("Any", None),
        log=Log(bundle, debug=False, shim="c", namespace="n"),
        moves=SimpleNamespace(expect=lambda: done.append("expect")),
    )
    uris = StdioUris("", "", "", terminal=False)
    container = Container(context, "c", bundle, RuntimeOptions(), uris)
    with raises(RuntimeFailed):
        await container.create(task_pb2.CreateTaskRequest(id="c", bundle=bundle))
    assert done == ["expect", "expect", "create"]

    container.init.child = Child(4_000_000)
    container.init.advance(Event.STARTED)
    monkeypatch.setattr(container, "_report", lambda *_, **__: None)
    await container.add_exec("e", {}, uris)
    done.clear()
    with raises(RuntimeFailed):
        await container.start("e")
    assert done == ["expect", "exec"]
