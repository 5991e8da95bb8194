"""Which operations on a container wait for others, and for how long."""

from __future__ import annotations

import anyio
import pytest

from shim.pod import operations as module
from shim.pod.operations import AFTER, Kind, Operations, Wait

pytestmark = pytest.mark.anyio

_OF_EXECS = {Kind.EXEC, Kind.START_EXEC, Kind.DELETE_EXEC}


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LATE", 0.1)


class _Turns:
    """Operations that the test starts and ends."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self.operations = Operations()
        self.log: list[str] = []
        self._tasks = tasks
        self._ends: dict[str, anyio.Event] = {}

    async def begin(self, name: str, kind: Kind, exec_id: str = "") -> None:
        self._ends[name] = anyio.Event()
        self._tasks.start_soon(self._take, name, kind, exec_id)
        await anyio.wait_all_tasks_blocked()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await anyio.wait_all_tasks_blocked()

    async def _take(self, name: str, kind: Kind, exec_id: str) -> None:
        async with self.operations.turn(kind, exec_id) as turn:
            overdue = "".join(f" without {other.name}" for other in turn.overdue)
            self.log.append(name + overdue)
            await self._ends[name].wait()


@pytest.mark.parametrize("later", Kind)
async def test_an_operation_waits_for_what_the_table_lists_and_overtakes_the_rest(
    later: Kind,
) -> None:
    for earlier in Kind:
        await _one_after(earlier, later)


async def _one_after(earlier: Kind, later: Kind) -> None:
    async with anyio.create_task_group() as tasks:
        turns = _Turns(tasks)
        await turns.begin("earlier", earlier, "e1" if earlier in _OF_EXECS else "")
        await turns.begin("later", later, "e1" if later in _OF_EXECS else "")
        wait = AFTER[later].get(earlier)
        assert turns.log == (["earlier", "later"] if wait is None else ["earlier"])
        if wait is Wait.BRIEFLY:
            await anyio.sleep(0.2)
            assert turns.log == ["earlier", f"later without {earlier.name}"]
        await turns.end("earlier")
        assert len(turns.log) == 2
        await turns.end("later")


async def test_operations_on_execs_wait_for_those_on_the_same_exec_alone() -> None:
    async with anyio.create_task_group() as tasks:
        turns = _Turns(tasks)
        await turns.begin("start 1", Kind.START_EXEC, "e1")
        await turns.begin("start 2", Kind.START_EXEC, "e2")
        await turns.begin("delete 1", Kind.DELETE_EXEC, "e1")
        assert turns.log == ["start 1", "start 2"]
        assert turns.operations.has(Kind.START_EXEC, exec_id="e2")
        assert not turns.operations.has(Kind.START_EXEC, exec_id="e3")
        await turns.end("start 1")
        assert turns.log == ["start 1", "start 2", "delete 1"]
        await turns.end("start 2")
        await turns.end("delete 1")
        assert not turns.operations.has(*Kind)


async def test_one_that_is_cancelled_while_it_waits_leaves_the_queue() -> None:
    async with anyio.create_task_group() as tasks:
        turns = _Turns(tasks)
        await turns.begin("pause", Kind.PAUSE)
        with anyio.move_on_after(0.01):
            async with turns.operations.turn(Kind.RESUME):
                pass
        assert not turns.operations.has(Kind.RESUME)
        await turns.end("pause")


async def test_what_asks_for_the_end_of_operations_learns_whether_they_have_ended() -> None:
    async with anyio.create_task_group() as tasks:
        turns = _Turns(tasks)
        assert await turns.operations.ended(Kind.START)
        await turns.begin("start", Kind.START)
        assert not await turns.operations.ended(Kind.START)
        await turns.end("start")
        assert await turns.operations.ended(Kind.START)
