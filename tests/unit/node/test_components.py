"""How parts of the agent are kept going."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from hooks.config import Config
from integration.node import backoff, components
from integration.node.components import Context, keep
from integration.node.errors import AgentStateUnusable
from integration.node.options import Options

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

pytestmark = pytest.mark.anyio


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def context(said: list[str], monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setattr(backoff, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(components, "_WELL", 0.01)

    def say(level: str, event: str, **_: Any) -> None:
        said.append(f"{level}: {event}")

    return Context(Config(), Options("", 60), say)


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Context], Awaitable[None]]], str]:
    def make(run: Callable[[Context], Awaitable[None]]) -> str:
        module: Any = ModuleType("a_part")
        module.run = run
        monkeypatch.setitem(sys.modules, "a_part", module)
        return "a_part"

    return make


async def test_one_that_fails_is_said_once_and_at_fault_until_it_goes(
    context: Context, said: list[str], part: Callable[..., str]
) -> None:
    begun = []
    goes = anyio.Event()

    async def run(_: Context) -> None:
        begun.append(dict(context.board.faults))
        if len(begun) < 3:
            raise AgentStateUnusable("to do it", found="no\nplace", do="make some")
        goes.set()
        await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep, "it", context, part(run))
        with anyio.fail_after(20):
            await goes.wait()
            while context.board.faults:
                await context.board.change("faults", since=context.board.version("faults"))
        tasks.cancel_scope.cancel()
    line = said[0].removeprefix("error: ")
    assert begun == [{}, {"it": line}, {"it": line}]
    assert len(said) == 1
    assert line.startswith("NVSHIM-E2702 ")
    assert "\n" not in line


async def test_one_that_ends_or_breaks_takes_no_other_down(
    context: Context, said: list[str], part: Callable[..., str]
) -> None:
    times = []
    again = anyio.Event()

    async def run(_: Context) -> None:
        times.append(1)
        if len(times) == 1:
            raise ZeroDivisionError("a defect")
        if len(times) == 3:
            again.set()
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep, "it", context, part(run))
        with anyio.fail_after(20):
            await again.wait()
        tasks.cancel_scope.cancel()
    assert said == [
        "error: it: ZeroDivisionError: a defect",
        "error: the part it of the agent ended",
    ]


async def test_one_that_cannot_be_imported_takes_no_other_down(
    context: Context, said: list[str]
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep, "it", context, "a_part_that_lacks")
        with anyio.fail_after(20):
            while not said:
                await context.board.change("faults", since=0)
        tasks.cancel_scope.cancel()
    assert said == ["error: it: ModuleNotFoundError: No module named 'a_part_that_lacks'"]


async def test_what_fails_in_a_task_of_a_part_is_said_as_it_is(
    context: Context, said: list[str], part: Callable[..., str]
) -> None:
    goes = anyio.Event()

    async def fail() -> None:
        raise AgentStateUnusable("to do it", found="no place", do="make some")

    async def run(_: Context) -> None:
        if said:
            goes.set()
            await anyio.sleep_forever()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep, "it", context, part(run))
        with anyio.fail_after(20):
            await goes.wait()
        tasks.cancel_scope.cancel()
    assert [line.partition(":")[2].split()[0] for line in said] == ["NVSHIM-E2702"]
