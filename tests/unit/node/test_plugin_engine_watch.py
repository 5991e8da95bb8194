"""When the agent queries the engine's capabilities, and which answer it uses meanwhile."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest

from integration.node.services.plugin import engine_watch
from integration.node.services.plugin.engine_watch import EngineAnswer, watch_engine
from integration.node.state.topic import Signal
from tests.harness.cri_server import CriServer
from tests.harness.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def watching(*sockets: str) -> AsyncIterator[tuple[list[EngineAnswer], Signal]]:
    """Return the published answers, and a function that requests another query."""
    answers, doubt = list[EngineAnswer](), Signal("a doubt")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch_engine, sockets, answers.append, doubt)
        yield answers, doubt
        tasks.cancel_scope.cancel()


def version(answer: EngineAnswer) -> str:
    return answer.engine.version if answer.engine is not None else ""


async def test_an_engine_is_asked_once_each_time_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "later" / "engine.sock")
    async with watching("/nowhere/engine.sock", path) as (answers, doubt):
        await until(lambda: answers == [EngineAnswer()])
        os.mkdir(os.path.dirname(path))
        with CriServer(path, "2.1.9", cdi=True) as engine:
            await until(lambda: version(answers[-1]) == "2.1.9")
            assert answers[-1].holds
            asked = engine.asked
            (tmp_path / "later" / "another.sock").touch()
            doubt.send()
            await anyio.sleep(0.3)
            assert engine.asked == asked
            known = answers[-1]
            await anyio.to_thread.run_sync(partial(engine.restart, "2.3.4", cdi=True))
            assert not known.holds
            await until(lambda: version(answers[-1]) == "2.3.4")
            assert [version(each) for each in answers] == ["", "2.1.9", "2.3.4"]
            monkeypatch.setattr(engine_watch, "_RESTART", 0)
        await until(lambda: answers[-1] == EngineAnswer())


async def test_one_that_does_not_answer_yet_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_watch, "_FIRST_PAUSE", 0.05)
    ask, failures = engine_watch._ask, [None, None]
    monkeypatch.setattr(
        engine_watch, "_ask", lambda sockets: failures.pop() if failures else ask(sockets)
    )
    monkeypatch.setattr(engine_watch, "_RESTART", 0)
    path = str(tmp_path / "engine.sock")
    with CriServer(path, "2.1.9", cdi=True):
        async with watching(path) as (answers, _):
            await until(lambda: len(answers) == 3)
            assert [version(each) for each in answers] == ["", "", "2.1.9"]


async def test_a_doubt_finds_what_inotify_does_not_report(tmp_path: Path) -> None:
    """The socket's path may be a link."""
    path, link = str(tmp_path / "engine.sock"), tmp_path / "run" / "engine.sock"
    link.parent.mkdir()
    link.symlink_to(path)
    async with watching(str(link)) as (answers, doubt):
        with CriServer(path, "2.1.9", cdi=True) as engine:
            doubt.send()
            await until(lambda: answers and version(answers[-1]) == "2.1.9")
            await anyio.to_thread.run_sync(partial(engine.restart, "2.3.4", cdi=True))
            assert not answers[-1].holds
            doubt.send()
            await until(lambda: version(answers[-1]) == "2.3.4")
