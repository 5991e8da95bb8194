"""The file by which NVML is let go, where its directory cannot be watched, or is another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from integration.node.monitor import letting_go

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def until(look: Callable[[], Any]) -> None:
    with anyio.fail_after(20):
        while not look():  # noqa: ASYNC110 - of a list
            await anyio.sleep(0.01)


async def test_a_file_is_found_though_its_directory_could_not_be_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(letting_go, "_DEAF", 0.05)
    state, told, deaf = tmp_path / "state", [""], list[str]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(letting_go.follow, str(state), told.append, deaf.append)
        await until(lambda: deaf)
        for _ in range(3):
            state.mkdir()
            await until(lambda: not deaf[-1])
            (state / letting_go.FILE).write_text("GPU 1 is reset\n")
            await until(lambda: told[-1] == "GPU 1 is reset")
            (state / letting_go.FILE).unlink()
            await until(lambda: not told[-1])
            state.rmdir()
            await until(lambda: deaf[-1])
        tasks.cancel_scope.cancel()
