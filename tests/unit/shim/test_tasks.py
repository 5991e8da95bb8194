"""A task that fails ends no other."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from shim.pod.server import GuardedTasks

pytestmark = pytest.mark.anyio


async def test_a_failure_is_logged_and_the_others_go_on() -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    ended = anyio.Event()

    class Log:
        def error(self, event: str, **fields: Any) -> None:
            told.append((event, fields))

    async def fail(what: str) -> None:
        raise RuntimeError(what)

    async def go_on() -> None:
        await anyio.sleep(0.05)
        ended.set()

    async with anyio.create_task_group() as group:
        tasks = GuardedTasks(group, Log())  # type: ignore[arg-type]
        tasks.start_soon(go_on)
        tasks.start_soon(fail, "can't start new thread")
        await anyio.sleep(0.01)
        assert not ended.is_set()
    assert ended.is_set()
    ((event, fields),) = told
    assert event == "a task of a container failed"
    assert "can't start new thread" in fields["traceback"]


async def test_a_cancelled_group_ends_its_tasks() -> None:
    async with anyio.create_task_group() as group:
        GuardedTasks(group, None).start_soon(anyio.sleep_forever)  # type: ignore[arg-type]
        await anyio.sleep(0.01)
        group.cancel_scope.cancel()
