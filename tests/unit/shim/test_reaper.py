"""The reaper with real processes: every waiter gets the exit status once, at any time."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import anyio
import pytest

from shim import loop, syscalls
from shim.children import Exit, Reaper, spawn
from tests.harness.own_process import restored

pytestmark = pytest.mark.anyio


@contextmanager
def _subreaper() -> Iterator[None]:
    with restored():
        syscalls.set_child_subreaper()
        yield


async def _reap_on_signal(reaper: Reaper, *, task_status: anyio.abc.TaskStatus[None]) -> None:
    with anyio.open_signal_receiver(signal.SIGCHLD) as signals:
        task_status.started()
        async for _ in signals:
            reaper.reap()


@pytest.mark.parametrize(
    ("script", "status"),
    [("exit 0", 0), ("exit 7", 7), ("exit 255", 255), ("kill -9 $$", 137), ("kill -15 $$", 143)],
)
async def test_status_is_the_exit_code_or_128_and_the_signal(script: str, status: int) -> None:
    reaper = Reaper()
    async with anyio.create_task_group() as tasks:
        await tasks.start(_reap_on_signal, reaper)
        child = spawn(reaper, ["sh", "-c", script], fds={})
        exit_ = await child.wait()
        tasks.cancel_scope.cancel()
    assert (exit_.pid, exit_.status) == (child.pid, status)
    assert abs(exit_.at - time.time_ns()) < 5e9


async def test_a_hundred_children_at_once_all_report_their_own_status() -> None:
    reaper = Reaper()
    async with anyio.create_task_group() as tasks:
        await tasks.start(_reap_on_signal, reaper)
        children = [spawn(reaper, ["sh", "-c", f"exit {n}"], fds={}) for n in range(100)]
        statuses = [(await child.wait()).status for child in children]
        tasks.cancel_scope.cancel()
    assert statuses == list(range(100))


def _orphan(status: int) -> int:
    """Leave an orphan that has exited, as runc leaves a container's init; return its pid."""
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        orphan = os.fork()
        if orphan == 0:
            os._exit(status)
        os.write(writing, str(orphan).encode())
        os._exit(0)
    os.waitpid(middle, 0)
    pid = int(os.read(reading, 16))
    os.close(reading)
    os.close(writing)
    _wait_until_dead(pid)
    return pid


def _wait_until_dead(pid: int) -> None:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


async def test_an_exit_that_comes_before_the_pid_is_known_is_kept() -> None:
    reaper = Reaper()
    with _subreaper(), reaper.window():
        pid = _orphan(42)
        reaper.reap()
        child = reaper.register(pid)
        assert child.exit is not None
        assert (await child.wait()).status == 42


async def test_exits_of_unknown_processes_are_not_hoarded() -> None:
    reaper = Reaper()
    with _subreaper():
        with reaper.window():
            _orphan(1)
            reaper.reap()
            assert len(reaper._unclaimed) == 1
        assert not reaper._unclaimed
        _orphan(2)
        reaper.reap()
        assert not reaper._unclaimed


async def test_a_kept_exit_is_not_given_to_a_later_process_of_the_same_pid() -> None:
    reaper = Reaper()
    with reaper.window():
        alive = os.fork()
        if alive == 0:
            signal.pause()
            os._exit(0)
        try:
            # As if another process with this pid had been reaped a moment ago.
            reaper._unclaimed[alive] = Exit(alive, 3, 0)
            child = reaper.register(alive)
            assert child.exit is None
        finally:
            os.kill(alive, signal.SIGKILL)
            _wait_until_dead(alive)
        reaper.reap()
        assert (await child.wait()).status == 137


async def test_others_have_their_turn_while_children_end_without_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reaper, reaped = Reaper(), itertools.count()

    def another(*_: int) -> SimpleNamespace:
        assert next(reaped) < 1 << 14, "nothing else had its turn"
        return SimpleNamespace(si_pid=1, si_status=0, si_code=os.CLD_EXITED)

    with loop.handle_signals({signal.SIGCHLD: reaper.reap}), monkeypatch.context() as patched:
        patched.setattr(os, "waitid", another)
        for _ in range(100):  # as many as end while others are reaped
            signal.raise_signal(signal.SIGCHLD)
        for _ in range(4):
            before = next(reaped)
            await loop.checkpoint()
            assert before + 1 < next(reaped) < before + 1000, "a few, and nobody is forgotten"


async def test_of_very_many_unknown_processes_the_newest_exits_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reaper, count = Reaper(), 1 << 15
    # Its exit was kept before, under a number that is used again.
    pids = iter([count, *range(1, count + 1)])

    def another(*_: int) -> SimpleNamespace | None:
        pid = next(pids, None)
        return pid and SimpleNamespace(si_pid=pid, si_status=pid % 100, si_code=os.CLD_EXITED)

    with reaper.window(), monkeypatch.context() as patched:
        patched.setattr(os, "waitid", another)
        for _ in range(count // 50):
            reaper.reap()
        assert len(reaper._unclaimed) <= 1 << 14
        assert (count, count - 1) == tuple(itertools.islice(reversed(reaper._unclaimed), 2))
