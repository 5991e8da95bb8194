"""The file by which NVML is let go, where its directory cannot be watched, or is another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from hooks.config import Config
from integration.node.components import Context
from integration.node.monitor import letting_go
from integration.node.options import Options
from shim import syscalls
from tests.harness.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def test_a_file_is_found_though_its_directory_comes_later_or_is_not_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    context = Context(Config(state=str(state)), Options("", 1), lambda *_, **__: None)
    board = context.board
    real, refused = syscalls.inotify_init, True

    def init() -> int:
        if refused:
            raise OSError(24, "Too many open files")
        return real()

    monkeypatch.setattr(syscalls, "inotify_init", init)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(letting_go.follow, context)
        await until(lambda: board.faults)
        for _ in range(3):
            state.mkdir()
            (state / letting_go.FILE).write_text("GPU 1 is reset\n")
            await until(lambda: board.let_go == "GPU 1 is reset")
            (state / letting_go.FILE).unlink()
            await until(lambda: not board.let_go)
            state.rmdir()
            refused = False
            await until(lambda: not board.faults)
        tasks.cancel_scope.cancel()
