"""Supervision of the agent's services."""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from hooks.config import Config
from integration import backoff
from integration.agent_errors import AgentStateUnusable
from integration.node import service as components
from integration.node.options import Options
from integration.node.service import Context, supervise
from integration.node.state.topic import version_of, wait_any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

pytestmark = pytest.mark.anyio


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def context(said: list[str], monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setattr(backoff, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(components, "_RUNS_WELL_AFTER", 0.01)

    def say(level: str, event: str, **_: Any) -> None:
        said.append(f"{level}: {event}")

    return Context(Config(), Options("", 60), say)


class Services:
    """Supervises a service whose behaviour a test chooses."""

    def __init__(self, context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
        self.context = context
        self.goes = anyio.Event()
        self._monkeypatch = monkeypatch

    async def stay(self) -> None:
        """Run as a healthy service does."""
        self.goes.set()
        await anyio.sleep_forever()

    @asynccontextmanager
    async def kept(self, run: Callable[[Context], Awaitable[None]] | None) -> AsyncIterator[None]:
        if run is not None:
            module: Any = ModuleType("a_service")
            module.run = run
            self._monkeypatch.setitem(sys.modules, "a_service", module)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervise, "it", self.context, "a_service")
            with anyio.fail_after(20):
                yield
            tasks.cancel_scope.cancel()


@pytest.fixture
def services(context: Context, monkeypatch: pytest.MonkeyPatch) -> Services:
    return Services(context, monkeypatch)


async def test_one_that_fails_is_said_once_and_at_fault_until_it_goes(
    services: Services, said: list[str]
) -> None:
    state, begun = services.context.state, []

    async def run(_: Context) -> None:
        begun.append(dict(state.faults.lines))
        if len(begun) < 3:
            raise AgentStateUnusable("to do it", found="no\nplace", do="make some")
        await services.stay()

    async with services.kept(run):
        await services.goes.wait()
        while state.faults.lines:
            await wait_any(state.faults, since=version_of(state.faults))
    (line,) = (each.removeprefix("error: ") for each in said)
    assert begun == [{}, {"it": line}, {"it": line}]
    assert line.startswith("NVSHIM-E2702 ")
    assert "\n" not in line


async def test_one_that_ends_or_breaks_takes_no_other_down(
    services: Services, said: list[str]
) -> None:
    times = []

    async def run(_: Context) -> None:
        times.append(1)
        if len(times) == 1:
            raise ZeroDivisionError("a defect")
        if len(times) == 3:
            await services.stay()

    async with services.kept(run):
        await services.goes.wait()
    assert said == [
        "error: it: ZeroDivisionError: a defect",
        "error: the service it of the agent ended",
    ]


async def test_one_that_cannot_be_imported_takes_no_other_down(
    services: Services, said: list[str]
) -> None:
    async with services.kept(None):
        while not said:
            await wait_any(services.context.state.faults, since=0)
    assert said == ["error: it: ModuleNotFoundError: No module named 'a_service'"]


async def test_what_fails_in_a_task_of_a_service_is_said_as_it_is(
    services: Services, said: list[str]
) -> None:
    async def fail() -> None:
        raise AgentStateUnusable("to do it", found="no place", do="make some")

    async def run(_: Context) -> None:
        if said:
            await services.stay()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)

    async with services.kept(run):
        await services.goes.wait()
    assert [line.partition(":")[2].split()[0] for line in said] == ["NVSHIM-E2702"]
