"""Failures and concurrent requests: the shim under adverse conditions.

The tests call the shim directly, so that requests overlap in ways that no client intends. Where a
step must last long or fail, a shell script wraps the real low-level runtime.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from api import typeurl
from api.errors import Status
from api.ttrpc import ConnectionClosed, RemoteError
from tests.e2e.forgetful import FORGET_THE_TERMINAL
from tests.harness.shim import (
    LIFE,
    ShimByHand,
    StartShim,
    content_of,
    gone,
    outcome,
)

pytestmark = pytest.mark.anyio


async def _at_once(*calls: Awaitable[Any], apart: float = 0.0) -> list[int]:
    """Make overlapping calls; return their statuses in the order of the arguments."""
    outcomes = [-1] * len(calls)

    async def make(number: int, call: Awaitable[Any]) -> None:
        outcomes[number] = await outcome(call)

    async with anyio.create_task_group() as tasks:
        for number, call in enumerate(calls):
            tasks.start_soon(make, number, call)
            await anyio.sleep(apart)
    return outcomes


# -- requests that overlap ------------------------------------------------------------------


async def test_a_kill_is_answered_before_the_delete_that_its_exit_leads_to(
    shim: ShimByHand,
) -> None:
    # containerd deletes as soon as it gets the exit event, and then closes the connection.
    answered = []
    lingers = '[ "$verb" = kill ] && { $binary "$@"; status=$?; sleep 0.3; exit $status; }'
    await shim.run("c1", options=shim.options(before=lingers))

    async def kill() -> None:
        await shim.call("Kill", id="c1", signal=9)
        answered.append("Kill")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill)
        assert (await shim.call("Wait", id="c1")).exit_status == 137
        assert answered == []
        await shim.call("Delete", id="c1")
        answered.append("Delete")
    assert answered == ["Kill", "Delete"]


async def test_a_late_delete_does_not_touch_the_next_container_of_that_id(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "true") as shim:
        slow = shim.options(before='[ "$verb" = delete ] && sleep 0.2')
        await shim.run("c1", options=slow)
        await shim.call("Wait", id="c1")

        async def delete_then_create() -> None:
            await shim.call("Delete", id="c1")
            mount = {"type": "bind", "source": f"{shim.directory}/c1/rootfs", "options": ["rbind"]}
            await shim.create("c1", rootfs=[mount])

        deletes = (shim.call("Delete", id="c1") for _ in range(2))
        statuses = await _at_once(delete_then_create(), *deletes, apart=0.05)
        assert statuses == [Status.OK, Status.NOT_FOUND, Status.NOT_FOUND]
        assert await shim.status("c1") == "CREATED"
        assert f"mount {shim.directory}/c1/rootfs" in shim.leftovers()


async def test_delete_waits_for_a_start_under_way_and_is_refused(shim: ShimByHand) -> None:
    await shim.create("c1", options=shim.options(before='[ "$verb" = start ] && sleep 0.3'))
    start, delete = shim.call("Start", id="c1"), shim.call("Delete", id="c1")
    assert await _at_once(start, delete, apart=0.1) == [Status.OK, Status.FAILED_PRECONDITION]
    assert await shim.status("c1") == "RUNNING"
    assert await shim.end("c1") == 137
    await gone(shim, "c1")
    assert shim.events.names == LIFE


async def test_start_during_delete_fails_and_the_container_goes(shim: ShimByHand) -> None:
    await shim.create("c1", options=shim.options(before='[ "$verb" = delete ] && sleep 0.3'))
    delete, start = shim.call("Delete", id="c1"), shim.call("Start", id="c1")
    statuses = await _at_once(delete, start, apart=0.1)
    assert statuses[0] == Status.OK
    assert statuses[1] in (Status.NOT_FOUND, Status.FAILED_PRECONDITION)
    await gone(shim, "c1")
    assert shim.events.names == ["TaskCreate", "TaskExit", "TaskDelete"]


async def test_delete_of_an_exec_waits_for_its_start_and_is_refused(
    shim: ShimByHand,
) -> None:
    await shim.run("c1", options=shim.options(before='[ "$verb" = exec ] && sleep 0.3'))
    await shim.exec("c1", "e1", "sleep", "1000")
    start = shim.call("Start", id="c1", exec_id="e1")
    delete = shim.call("Delete", id="c1", exec_id="e1")
    assert await _at_once(start, delete, apart=0.1) == [Status.OK, Status.FAILED_PRECONDITION]
    await shim.call("Kill", id="c1", exec_id="e1", signal=9)
    assert (await shim.call("Wait", id="c1", exec_id="e1")).exit_status == 137
    assert (await shim.call("Delete", id="c1", exec_id="e1")).exit_status == 137
    await shim.end("c1")
    await gone(shim, "c1")
    execs = ["TaskExecAdded e1", "TaskExecStarted e1", "TaskExit e1"]
    assert shim.events.of("c1") == [*LIFE[:2], *execs, *LIFE[2:]]


async def test_of_two_deletes_of_an_exec_one_is_not_found(shim: ShimByHand) -> None:
    await shim.run("c1")
    stdout = shim.fifo("out")
    reader = os.open(stdout, os.O_RDONLY | os.O_NONBLOCK)
    await shim.start_exec("c1", "e1", "sh", "-c", "seq 30000", terminal=True, stdout=stdout)
    await anyio.sleep(0.3)
    await shim.call("Kill", id="c1", exec_id="e1", signal=9)
    await shim.call("Wait", id="c1", exec_id="e1")

    async def read_later() -> None:
        await anyio.sleep(0.3)
        with anyio.move_on_after(1):
            while True:
                await anyio.wait_readable(reader)
                if not os.read(reader, 1 << 16):
                    break

    deletes = [shim.call("Delete", id="c1", exec_id="e1") for _ in range(2)]
    statuses = await _at_once(*deletes, read_later())
    os.close(reader)
    assert sorted(statuses[:2]) == [Status.OK, Status.NOT_FOUND]


async def test_kill_during_start_ends_it(shim: ShimByHand) -> None:
    await shim.create("c1", options=shim.options(before='[ "$verb" = start ] && sleep 0.2'))
    kill = shim.call("Kill", id="c1", signal=9)
    _, killed = await _at_once(shim.call("Start", id="c1"), kill, apart=0.1)
    assert killed == Status.OK
    assert await shim.reap("c1") == 137
    await gone(shim, "c1")
    assert [name for name in shim.events.names if name != "TaskStart"] == [LIFE[0], *LIFE[2:]]


@pytest.mark.parametrize("shared_pids", [False, True], ids=["own pids", "shared pids"])
async def test_an_exec_started_while_init_dies_ends_with_it(
    start_shim: StartShim, *, shared_pids: bool
) -> None:
    async with start_shim("c0", "sh", "-c", "sleep 0.2", shared_pids=shared_pids) as shim:
        # The runtime has checked init while it was alive, and continues after its death.
        before = '[ "$verb" = exec ] && sleep 0.0$(($$ % 9))'
        for number in range(6):
            name = f"c{number}"
            if number:
                shim.bundle(name, "sh", "-c", "sleep 0.2", shared_pids=shared_pids)
            await shim.run(name, options=shim.options(before=before))
            await anyio.sleep(0.05 + 0.02 * number)
            added = await outcome(shim.exec(name, "e1", "sleep", "1000"))
            if added == Status.OK:
                await outcome(shim.call("Start", id=name, exec_id="e1"))
            with anyio.fail_after(60):
                assert (await shim.call("Wait", id=name)).exit_status == 0
            await shim.call("Delete", id=name)
        await gone(shim, "c0")
        for number in range(6):
            assert shim.events.of(f"c{number}")[-2:] == LIFE[2:]


async def test_of_the_same_call_several_times_at_once_one_succeeds(shim: ShimByHand) -> None:
    slow = shim.options(before='case "$verb" in delete | pause | resume) sleep 0.2 ;; esac')

    async def three(call: Callable[[], Awaitable[Any]], others: int) -> None:
        statuses = await _at_once(*(call() for _ in range(3)))
        assert sorted(statuses) == [Status.OK, others, others]

    await three(lambda: shim.create("c1", options=slow), Status.ALREADY_EXISTS)
    await three(lambda: shim.call("Start", id="c1"), Status.FAILED_PRECONDITION)
    await three(lambda: shim.exec("c1", "e1", "true"), Status.ALREADY_EXISTS)
    await three(lambda: shim.call("Pause", id="c1"), Status.FAILED_PRECONDITION)
    await three(lambda: shim.call("Resume", id="c1"), Status.FAILED_PRECONDITION)
    await shim.call("Kill", id="c1", signal=9)
    await shim.call("Wait", id="c1")
    await three(lambda: shim.call("Delete", id="c1"), Status.NOT_FOUND)
    await gone(shim, "c1")
    told = ["TaskExecAdded e1", "TaskPaused", "TaskResumed"]
    assert shim.events.of("c1") == [*LIFE[:2], *told, *LIFE[2:]]


async def test_shutdown_during_create_does_nothing(shim: ShimByHand) -> None:
    slow = shim.options(before='[ "$verb" = create ] && sleep 0.3')
    calls = shim.create("c1", options=slow), shim.call("Shutdown", id="c1")
    assert await _at_once(*calls, apart=0.1) == [Status.OK, Status.OK]
    assert await shim.status("c1") == "CREATED"


async def test_a_create_right_after_shutdown_is_refused_and_leaves_nothing(
    shim: ShimByHand,
) -> None:
    _, created = await _at_once(shim.call("Shutdown", id="c1"), _lost(shim.create("c1")))
    assert created != Status.OK
    await shim.until_gone()
    assert shim.leftovers() == []


async def _lost(call: Awaitable[Any]) -> None:
    """Make a call that may find the shim gone."""
    try:
        await call
    except ConnectionClosed as error:
        raise RemoteError("", status=Status.UNAVAILABLE, message=str(error), details=()) from error


# -- execs that fail ------------------------------------------------------------------------


async def test_an_exec_that_fails_to_start_lets_go_of_those_who_wait_for_it(
    shim: ShimByHand,
) -> None:
    await shim.run("c1")
    await shim.exec("c1", "e1", "no-such-program")
    wait = shim.call("Wait", id="c1", exec_id="e1")
    start = shim.call("Start", id="c1", exec_id="e1")
    waited, started = await _at_once(wait, start, apart=0.1)
    assert (waited, started) == (Status.FAILED_PRECONDITION, Status.UNKNOWN)
    late = shim.call("Wait", id="c1", exec_id="e1")
    assert await outcome(late) == Status.FAILED_PRECONDITION
    await shim.call("Delete", id="c1", exec_id="e1")
    await shim.end("c1")
    await gone(shim, "c1")
    assert shim.events.of("c1") == [*LIFE[:2], "TaskExecAdded e1", *LIFE[2:]]


async def test_a_start_that_failed_may_be_tried_again(shim: ShimByHand) -> None:
    once = 'f=${0%/*}/once; [ "$verb" = exec ] && [ ! -e $f ] && : > $f && exit 1'
    await shim.run("c1", options=shim.options(before=once))
    await shim.exec("c1", "e1", "sh", "-c", "sleep 0.2; exit 4")
    assert await outcome(shim.call("Start", id="c1", exec_id="e1")) == Status.UNKNOWN
    await shim.call("Start", id="c1", exec_id="e1")
    assert (await shim.call("Wait", id="c1", exec_id="e1")).exit_status == 4


async def test_who_waits_for_an_exec_never_started_is_told_when_it_or_its_container_is_deleted(
    shim: ShimByHand,
) -> None:
    await shim.run("c1")
    for name, end in (
        ("e1", shim.call("Delete", id="c1", exec_id="e1")),
        ("e2", shim.end("c1")),
    ):
        await shim.exec("c1", name, "true")
        wait = shim.call("Wait", id="c1", exec_id=name)
        assert await _at_once(wait, end, apart=0.1) == [Status.NOT_FOUND, Status.OK]


async def test_an_exec_whose_terminal_does_not_come_is_ended(shim: ShimByHand) -> None:
    await shim.run("c1", options=shim.options(before=FORGET_THE_TERMINAL))
    before = await shim.files_at_rest()
    await shim.exec("c1", "e1", "sleep", "999", terminal=True)
    assert await outcome(shim.call("Start", id="c1", exec_id="e1")) != Status.OK
    processes = (await shim.call("Pids", id="c1")).processes
    assert len(processes) == 1
    await shim.call("Delete", id="c1", exec_id="e1")
    assert await shim.files_at_rest(before) == before


async def test_a_malformed_exec_leaves_its_id_free(shim: ShimByHand) -> None:
    await shim.run("c1")
    for process in ({"args": 5, "cwd": "/"}, {"args": ["true"], "cwd": "/", "env": "none"}):
        spec = typeurl.pack_json(process, typeurl.PROCESS)
        added = await outcome(shim.call("Exec", id="c1", exec_id="e1", spec=spec))
        if added == Status.OK:
            start = shim.call("Start", id="c1", exec_id="e1")
            assert await outcome(start) not in (Status.OK, Status.INTERNAL)
            await shim.call("Delete", id="c1", exec_id="e1")
    await shim.start_exec("c1", "e1", "true")


async def test_an_exec_may_have_any_name_also_init(shim: ShimByHand) -> None:
    pid = await shim.run("c1", terminal=True, stdout=shim.fifo("out"))
    for terminal in (False, True):
        await shim.start_exec("c1", "init", "sh", "-c", "exit 6", terminal=terminal)
        assert (await shim.call("Wait", id="c1", exec_id="init")).exit_status == 6
        assert int(content_of(f"{shim.directory}/c1/init.pid")) == pid
        await shim.call("Delete", id="c1", exec_id="init")


async def test_a_signal_that_there_is_not_is_refused(shim: ShimByHand) -> None:
    await shim.run("c1")
    await shim.start_exec("c1", "e1", "sleep", "1000")
    for exec_id, number in itertools.product(("", "e1"), (0xFFFFFFFF, 65, 1 << 31)):
        kill = shim.call("Kill", id="c1", exec_id=exec_id, signal=number)
        assert await outcome(kill) == Status.INVALID_ARGUMENT
