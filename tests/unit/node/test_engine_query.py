"""What the container engine can do: how often it is asked."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import anyio
import pytest

from integration.node import engine_query
from integration.node.engine_query import EngineQuery

if TYPE_CHECKING:
    from pathlib import Path

    from integration.cri.engine import Engine

pytestmark = pytest.mark.anyio


async def test_callers_do_not_wait_for_a_silent_engine_one_after_the_other(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(path: str) -> Engine | None:
        asked.append(path)
        return None

    monkeypatch.setattr(engine_query, "_ask", ask)
    path = str(short_path / "engine.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        query = EngineQuery([path])
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(query.ask)
        assert asked == [path]
        assert await query.ask() is None
        assert asked == [path, path], "it is asked again later"
