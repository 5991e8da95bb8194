"""The Task service, called directly: its answers, and the order of its events."""

from __future__ import annotations

import copy
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any, Final

import anyio
import pytest

from api.proto import events_pb2, task_types_pb2
from api.ttrpc import RemoteError
from tests.harness.runtime import is_alive
from tests.harness.shim import ShimByHand, StartShim, wait_for_file

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("bootstrap", [False, True], ids=["legacy, v2", "bootstrap, v3"])
async def test_a_whole_life_in_both_dialects_leaves_nothing(
    start_shim: StartShim, bootstrap: bool
) -> None:
    async with start_shim("c1", "sh", "-c", "exit 7", bootstrap=bootstrap) as shim:
        pid = await shim.create("c1")
        state = await shim.call("State", id="c1")
        assert (state.status, state.pid) == (task_types_pb2.CREATED, pid)
        assert (await shim.call("Start", id="c1")).pid == pid
        before = time.time()
        waited = await shim.call("Wait", id="c1")
        assert waited.exit_status == 7
        assert abs(waited.exited_at.ToNanoseconds() / 1e9 - before) < 10
        state = await shim.call("State", id="c1")
        assert (state.status, state.exit_status) == (task_types_pb2.STOPPED, 7)
        deleted = await shim.call("Delete", id="c1")
        assert (deleted.pid, deleted.exit_status) == (pid, 7)
        await shim.call("Shutdown", id="c1")
        await shim.until_gone()
        assert shim.leftovers() == []
        assert shim.events.names == ["TaskCreate", "TaskStart", "TaskExit", "TaskDelete"]
        assert {event.container_id for event in shim.events.events} == {"c1"}  # type: ignore[attr-defined]


async def test_start_is_told_before_exit_however_short_the_process(start_shim: StartShim) -> None:
    async with start_shim("c0", "true") as shim:
        for number in range(10):
            if number:
                shim.bundle(f"c{number}", "true")
            await shim.create(f"c{number}")
            await shim.call("Start", id=f"c{number}")
            await shim.call("Wait", id=f"c{number}")
            await shim.call("Delete", id=f"c{number}")
        await shim.events.until("TaskDelete", count=10)
        for number in range(10):
            mine = [
                type(e).__name__
                for e in shim.events.events
                if e.container_id == f"c{number}"  # type: ignore[attr-defined]
            ]
            assert mine == ["TaskCreate", "TaskStart", "TaskExit", "TaskDelete"]


async def test_exits_of_execs_are_told_before_that_of_init(shim: ShimByHand) -> None:
    await shim.create("c1")
    await shim.call("Start", id="c1")
    for exec_id in ("e1", "e2", "e3"):
        await shim.start_exec("c1", exec_id, "sleep", "1000")
    await shim.call("Kill", id="c1", signal=signal.SIGKILL)
    assert (await shim.call("Wait", id="c1")).exit_status == 137
    await shim.events.until("TaskExit", count=4)
    exits = [e.id for e in shim.events.events if isinstance(e, events_pb2.TaskExit)]
    assert sorted(exits[:3]) == ["e1", "e2", "e3"]
    assert exits[3] == "c1"
    assert [e for e in shim.events.names if e.startswith("TaskExec")] == [
        "TaskExecAdded",
        "TaskExecStarted",
    ] * 3
    for exec_id in ("e1", "e2", "e3"):
        assert (await shim.call("Delete", id="c1", exec_id=exec_id)).exit_status == 137


async def test_a_container_killed_before_its_start_is_told_and_deleted(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "true") as shim:
        await shim.create("c1")
        await shim.call("Kill", id="c1", signal=9)
        assert await shim.reap("c1") == 137
        await shim.events.until("TaskDelete")
        assert shim.events.names == ["TaskCreate", "TaskExit", "TaskDelete"]


async def test_what_shares_the_pid_namespace_of_the_host_dies_with_init(
    start_shim: StartShim,
) -> None:
    script = "sleep 1234567 & echo $! > /pid; exit 5"
    async with start_shim("c1", "sh", "-c", script, shared_pids=True) as shim:
        await shim.create("c1")
        await shim.call("Start", id="c1")
        assert (await shim.call("Wait", id="c1")).exit_status == 5
        left = int(wait_for_file(f"{shim.directory}/c1/rootfs/pid"))
        with anyio.fail_after(60):
            while is_alive(left):  # noqa: ASYNC110 - seen from outside
                await anyio.sleep(0.01)


async def test_exec_while_the_runtime_still_starts_init_comes_after_it(
    shim: ShimByHand,
) -> None:
    # The runtime has started the program, and does not return until the test lets it.
    slow = """[ "$verb" = start ] && {
        "$binary" "$@"; echo yes >"${0%/*}/runs"
        until [ -e "${0%/*}/on" ]; do sleep 0.02; done; exit
    }"""
    await shim.create("c1", options=shim.options(before=slow))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: shim.call("Start", id="c1"))
        await anyio.to_thread.run_sync(wait_for_file, f"{shim.directory}/runs")
        tasks.start_soon(shim.exec, "c1", "e1", "true")
        await anyio.sleep(0.1)
        assert await shim.status("c1") == "CREATED"  # answered when the exec was requested
        os.mknod(f"{shim.directory}/on")
    await shim.call("Start", id="c1", exec_id="e1")
    await shim.events.until("TaskExecAdded")
    assert shim.events.names[:3] == ["TaskCreate", "TaskStart", "TaskExecAdded"]
    assert (await shim.call("Wait", id="c1", exec_id="e1")).exit_status == 0


async def test_pids_name_the_exec_that_a_process_is(shim: ShimByHand) -> None:
    init = await shim.create("c1")
    await shim.call("Start", id="c1")
    pid = await shim.start_exec("c1", "e1", "sleep", "1000")
    by_pid = {p.pid: p.info for p in (await shim.call("Pids", id="c1")).processes}
    assert set(by_pid) == {init, pid}
    assert by_pid[pid].type_url == "containerd.runc.v1.ProcessDetails"
    assert b"e1" in by_pid[pid].value
    assert by_pid[init].type_url == ""
    await shim.call("Kill", id="c1", signal=9)
    await shim.call("Wait", id="c1")
    # With an empty list, a restarted containerd would delete the task.
    assert [p.pid for p in (await shim.call("Pids", id="c1")).processes] == [init]


BROKEN: Final[tuple[tuple[Callable[[dict[str, Any]], object], str], ...]] = (
    (lambda spec: spec.update(process="none"), "E0"),
    (lambda spec: spec["root"].update(path="nowhere"), "no such directory"),
    (lambda spec: spec.pop("root"), "no root.path"),
    (lambda spec: spec["process"].update(args=["no-such"]), "executable file not found"),
    (lambda spec: spec["linux"].update(namespaces=5), "namespaces"),
)


async def test_a_create_that_fails_says_why_in_a_line_and_leaves_nothing(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "true") as shim:
        whole = shim.spec("c1")
        for break_it, found in BROKEN:
            spec = copy.deepcopy(whole)
            break_it(spec)
            shim.write_spec("c1", spec)
            with pytest.raises(RemoteError, match=found) as caught:
                await shim.create("c1")
            assert "NVSHIM-E" in str(caught.value)
            assert "\n" not in str(caught.value)
        await shim.call("Shutdown", id="c1")
        await shim.until_gone()
        assert shim.leftovers() == []
        assert shim.events.names == []


GARBAGE: Final = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x00\x00\x00\x04\x00\x00\x00\x01\x01\x00\xff\xff\xff\xff",  # no request
    b"\xff" * 4096,
    b"\x00\x00\x00\x00\x00\x00\x00\x02\x01\x00",  # an even stream
    b"\x00",  # cut off
)


async def test_garbage_on_the_socket_harms_nobody_else(shim: ShimByHand) -> None:
    await shim.create("c1")
    for garbage in GARBAGE:
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(shim.socket_path)
            other.sendall(garbage)
        assert (await shim.call("State", id="c1")).status == task_types_pb2.CREATED, garbage
