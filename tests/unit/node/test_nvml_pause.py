"""The file that makes the agent close NVML, an unwatched directory, and the end of a reset."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from hooks.config import Config
from hooks.node.drained import Drain, read_drains
from integration.devices import drain_marks as marks
from integration.drain.resetting import _TO_PROVE, _TO_RESET
from integration.drain.serving import _TO_LET_GO
from integration.node.options import Options
from integration.node.service import Context
from integration.node.services.monitor import nvml_pause
from integration.node.services.monitor.events import Watch
from integration.node.state.store import State
from integration.nvml.lock import exclusive, is_exclusive
from integration.nvml.nvidia_smi import TO_CLOSE
from integration.nvml.session import Children
from shim import syscalls
from tests.harness.node_state import publish
from tests.harness.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def test_a_file_is_found_though_its_directory_comes_later_or_is_not_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "state"
    context = Context(Config(state=str(directory)), Options("", 1), lambda *_, **__: None)
    state = context.state
    real, refused = syscalls.inotify_init, True

    def init() -> int:
        if refused:
            raise OSError(24, "Too many open files")
        return real()

    monkeypatch.setattr(syscalls, "inotify_init", init)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(nvml_pause.follow, context)
        await until(lambda: state.faults.lines)
        for _ in range(3):
            directory.mkdir()
            (directory / nvml_pause.FILE).write_text("GPU 1 is reset\n")
            await until(lambda: state.nvml_pause.value == "GPU 1 is reset")
            (directory / nvml_pause.FILE).unlink()
            await until(lambda: not state.nvml_pause.value)
            directory.rmdir()
            refused = False
            await until(lambda: not state.faults.lines)
        tasks.cancel_scope.cancel()


async def test_a_reset_that_does_not_end_has_nvml_closed_for_so_long_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(state=str(tmp_path / "state"), drained=str(tmp_path / "drained"))
    said: list[str] = []

    def say(level: str, event: str, **_: Any) -> None:
        said.append(f"{level} {event}")

    context = Context(config, Options("", 1), say)
    state = context.state
    with marks.resetting(config), exclusive(config.state, 0):
        marks.put(config, Drain("GPU-1", reset="waits"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(nvml_pause.follow, context)
            marks.step(config, "GPU-1", "it is reset", closed=True)
            await until(lambda: state.nvml_pause.value.startswith("GPU-1 is out of service"))
            monkeypatch.setattr(nvml_pause, "LONGEST", 0.0)
            await until(lambda: not state.nvml_pause.value)
            # Other processes that open NVML now do not wait for it, either.
            assert not is_exclusive(config.state)
            assert "error a reset takes too long; NVML is opened anyway" in said
            tasks.cancel_scope.cancel()


def test_no_reset_may_take_longer_than_the_agent_has_nvml_closed_for_it() -> None:
    assert nvml_pause.LONGEST > _TO_LET_GO + TO_CLOSE + _TO_RESET + _TO_PROVE


def test_a_mig_layout_has_as_long_for_each_gpu_that_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(state=str(tmp_path / "state"), drained=str(tmp_path / "drained"))
    clock = 0.0
    monkeypatch.setattr(nvml_pause, "time", SimpleNamespace(monotonic=lambda: clock))
    resets = nvml_pause._Resets(Context(config, Options("", 1), lambda *_, **__: None))
    with marks.resetting(config):
        for device in ("GPU-1", "GPU-2"):
            marks.put(config, Drain(device, reset="waits"))
            marks.step(config, device, "it is changed", closed=True)
        assert resets.reason(read_drains(config))
        clock = 0.9 * nvml_pause.LONGEST
        marks.step(config, "GPU-1", "it is done")
        assert resets.reason(read_drains(config))
        clock = 1.8 * nvml_pause.LONGEST
        assert resets.reason(read_drains(config))
        clock = 2.0 * nvml_pause.LONGEST
        assert not resets.reason(read_drains(config))


async def test_each_gpu_of_a_mig_layout_is_unwatched_also_one_that_is_marked_later(
    tmp_path: Path,
) -> None:
    state, why = State(), "GPU-1 is out of service for its MIG layout"
    children = Children(lambda *_, **__: None, str(tmp_path))
    watch = Watch(state, children, lambda _: None, lambda *_, **__: None, to_answer=1)
    publish(state.resetting_gpus, frozenset({"GPU-1"}))
    publish(state.nvml_pause, why)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.keep)
        await until(lambda: state.unwatched.value == {"GPU-1": why})
        publish(state.resetting_gpus, frozenset({"GPU-1", "GPU-2"}))
        await until(lambda: state.unwatched.value == {"GPU-1": why, "GPU-2": why}, timeout=10)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("by_person", [False, True])
async def test_a_mark_of_a_reset_that_was_killed_counts_if_a_person_says_so_alone(
    tmp_path: Path, *, by_person: bool
) -> None:
    config = Config(state=str(tmp_path / "state"), drained=str(tmp_path / "drained"))
    context = Context(config, Options("", 1), lambda *_, **__: None)
    state = context.state
    async with anyio.create_task_group() as tasks:
        with marks.resetting(config):
            marks.put(config, Drain("GPU-1", lets_go=by_person))
            marks.put(config, Drain("GPU-1", reset="waits"))
            marks.step(config, "GPU-1", "it is reset", closed=True)
            tasks.start_soon(nvml_pause.follow, context)
            await until(lambda: state.nvml_pause.value)
        if by_person:
            marks.step(config, "GPU-1", "it failed: no")
            assert read_drains(config)[0].lets_go
        else:
            await until(lambda: not state.nvml_pause.value)
            # The next reset starts with NVML open, and has to wait until it is closed.
            with marks.resetting(config):
                assert not read_drains(config)[0].lets_go
        tasks.cancel_scope.cancel()
