from __future__ import annotations

from functools import partial

import anyio
import pytest

from integration.node.state.store import Board
from integration.nvml.snapshot import NodeSnapshot
from integration.nvml.values import GpuEvent

pytestmark = pytest.mark.anyio

EVENT = GpuEvent(when=1.0, kind="xid", gpu="GPU-0", xid=79)


async def test_a_change_wakes_who_waits_for_it() -> None:
    board = Board()
    since = board.version("seen", "faults")
    async with anyio.create_task_group() as tasks:
        woken = []

        async def wait(*names: str) -> None:
            await board.change(*names, since=since)
            woken.append(names)
            tasks.cancel_scope.cancel()

        tasks.start_soon(wait, "seen", "faults")
        await anyio.wait_all_tasks_blocked()
        board.post(health={"GPU-0": None})  # nobody waits for that
        board.post(seen=NodeSnapshot())  # as it was
        await anyio.wait_all_tasks_blocked()
        assert not woken
        board.post(seen=NodeSnapshot(faults=("no driver",)))
    assert woken == [("seen", "faults")]


async def test_a_change_that_has_come_already_is_not_waited_for() -> None:
    board = Board()
    since = board.version("wanted")
    board.want_look()
    assert await board.change("wanted", since=since) != since
    now = board.version("wanted")
    assert await board.change("wanted", since=now, timeout=0.01) == now


async def test_a_change_wakes_nobody_who_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    async with anyio.create_task_group() as tasks:
        for name in ("health", "mps", "dra"):
            tasks.start_soon(partial(board.change, name, since=board.version(name)))
        await anyio.wait_all_tasks_blocked()
        looks = []

        def version(*names: str) -> int:
            looks.append(names)
            return Board.version(board, *names)

        monkeypatch.setattr(board, "version", version)
        board.post(wanted=1, claimed=(), health={})  # health is as it was
        await anyio.wait_all_tasks_blocked()
        assert looks == []
        board.post(mps={"nvidia.com/gpu": None})
        await anyio.wait_all_tasks_blocked()
        assert looks == [("mps",)]
        tasks.cancel_scope.cancel()


async def test_events_are_told_in_order_to_all_who_listen() -> None:
    board = Board()
    board.tell(EVENT)  # to nobody
    with board.listen() as first, board.listen() as second:
        board.tell(EVENT)
        board.tell(GpuEvent(when=2.0, kind="ecc-double", gpu=""))
        for stream in (first, second):
            assert [stream.receive_nowait().when for _ in range(2)] == [1.0, 2.0]
    board.tell(EVENT)  # nor does it fail when they are gone


async def test_one_who_does_not_read_keeps_nobody_from_telling() -> None:
    board = Board()
    with board.listen() as stream:
        for _ in range(5000):
            board.tell(EVENT)
        assert stream.statistics().current_buffer_used < 5000


async def test_faults_come_and_go_by_part() -> None:
    board = Board()
    board.fault("plugin", "no kubelet")
    board.fault("metrics", "no port")
    board.fault("plugin", "")
    assert board.faults == {"metrics": "no port"}


async def test_what_follows_is_done_at_each_change_and_at_once_if_asked() -> None:
    board, done = Board(), list[str]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(board.follow, lambda: done.append("later"), "hangups")
        tasks.start_soon(partial(board.follow, lambda: done.append("now"), "hangups", at_once=True))
        await anyio.wait_all_tasks_blocked()
        assert done == ["now"]
        board.post(hangups=1)
        board.want_look()  # of another name
        await anyio.wait_all_tasks_blocked()
        assert sorted(done) == ["later", "now", "now"]
        tasks.cancel_scope.cancel()
