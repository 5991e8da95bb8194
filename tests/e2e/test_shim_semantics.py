"""What containerd can rely on for each request, in each state of a container."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable
from typing import Any, Final

import anyio
import pytest

from api.errors import Status
from api.ttrpc import RemoteError
from tests.harness.runtime import is_alive, new_name
from tests.harness.shim import (
    LIFE,
    NAMESPACE,
    ShimByHand,
    StartShim,
    content_of,
    gone,
    outcome,
    wait_for_file,
)

pytestmark = pytest.mark.anyio


# -- every request at every moment -----------------------------------------------------------

OK, NOT_FOUND, WRONG = Status.OK, Status.NOT_FOUND, Status.FAILED_PRECONDITION

# The answers in each state of the container; requests that change the state come last. Those that
# are OK, and those that are NOT_FOUND, are so with containerd's own shim, too.
_ANSWERS: Final[dict[str, dict[str, int]]] = {
    "absent": {
        "State": NOT_FOUND, "Pids": NOT_FOUND, "Wait": NOT_FOUND, "Kill": NOT_FOUND,
        "Kill all": NOT_FOUND, "Start": NOT_FOUND, "Pause": NOT_FOUND, "Resume": NOT_FOUND,
        "ResizePty": NOT_FOUND, "CloseIO": NOT_FOUND, "Exec": NOT_FOUND, "Delete": NOT_FOUND,
        "Connect": OK, "Shutdown of a task": OK,
    },
    "created": {
        "State": OK, "Pids": OK, "Pause": WRONG, "Resume": WRONG, "ResizePty": OK, "CloseIO": OK,
        "Exec": OK, "Create": Status.ALREADY_EXISTS, "Connect": OK, "Shutdown": OK, "Kill 0": OK,
    },
    "running": {
        "State": OK, "Pids": OK, "Resume": WRONG, "ResizePty": OK, "CloseIO": OK, "Start": WRONG,
        "Create": Status.ALREADY_EXISTS, "Connect": OK, "Shutdown": OK, "Delete": WRONG,
        "Kill 0": OK, "Exec own id": Status.ALREADY_EXISTS,
    },
    "paused": {
        "State": OK, "Pids": OK, "Pause": WRONG, "ResizePty": OK, "CloseIO": OK, "Start": WRONG,
        "Create": Status.ALREADY_EXISTS, "Exec": WRONG, "Connect": OK, "Shutdown": OK,
        "Delete": WRONG,
    },
    "stopped": {
        "State": OK, "Pids": OK, "Wait": OK, "Kill": NOT_FOUND, "Kill 0": NOT_FOUND, "Kill all": OK,
        "Start": WRONG, "Pause": WRONG, "Resume": WRONG, "ResizePty": OK, "CloseIO": OK,
        "Exec": WRONG, "Create": Status.ALREADY_EXISTS, "Connect": OK, "Shutdown": OK,
    },
}  # fmt: skip


def _request(shim: ShimByHand, name: str) -> Awaitable[Any]:
    match name:
        case "Create":
            return shim.create("c1")
        case "Exec":
            return shim.exec("c1", new_name("e"), "true")
        case "Exec own id":
            return shim.exec("c1", "c1", "true")
        case "Kill" | "Kill all" | "Kill 0":
            signum = 0 if name == "Kill 0" else 9
            return shim.call("Kill", id="c1", signal=signum, all=name == "Kill all")
        case "Shutdown of a task":
            return shim.call("Shutdown", id="c9")
        case "CloseIO":
            return shim.call("CloseIO", id="c1", stdin=True)
        case "ResizePty":
            return shim.call("ResizePty", id="c1", width=80, height=24)
        case _:
            return shim.call(name, id="c1")


async def _answers(shim: ShimByHand, state: str) -> dict[str, int]:
    return {name: await outcome(_request(shim, name)) for name in _ANSWERS[state]}


async def test_every_request_is_answered_as_containerd_expects_in_every_state(
    start_shim: StartShim,
) -> None:
    async with start_shim("c0", "sleep", "1000") as shim:
        await shim.create("c0")  # so that no Shutdown ends the shim
        shim.bundle("c1", "sleep", "1000")
        assert await _answers(shim, "absent") == _ANSWERS["absent"]
        await shim.create("c1")
        assert await _answers(shim, "created") == _ANSWERS["created"]
        await shim.call("Start", id="c1")
        assert await _answers(shim, "running") == _ANSWERS["running"]
        await shim.call("Pause", id="c1")
        assert await _answers(shim, "paused") == _ANSWERS["paused"]
        await shim.call("Resume", id="c1")
        await shim.call("Kill", id="c1", signal=9)
        waited = await shim.call("Wait", id="c1")
        assert await _answers(shim, "stopped") == _ANSWERS["stopped"]
        state = await shim.call("State", id="c1")
        assert (state.exit_status, state.exited_at) == (137, waited.exited_at)
        assert await shim.call("Wait", id="c1") == waited
        deleted = await shim.call("Delete", id="c1")
        assert (deleted.exit_status, deleted.exited_at) == (137, waited.exited_at)
        assert await _answers(shim, "absent") == _ANSWERS["absent"]


_OF_AN_EXEC: Final = {
    "added": {"State": OK, "Kill": WRONG, "ResizePty": OK, "CloseIO": OK},
    "running": {
        "State": OK, "Start": WRONG, "ResizePty": OK, "CloseIO": OK, "Delete": WRONG, "Kill": OK,
    },
    "stopped": {
        "State": OK, "Start": WRONG, "Kill": NOT_FOUND, "Wait": OK, "ResizePty": OK, "CloseIO": OK,
        "Delete": OK,
    },
    "deleted": {
        "State": NOT_FOUND, "Start": NOT_FOUND, "Kill": NOT_FOUND, "Wait": NOT_FOUND,
        "ResizePty": NOT_FOUND, "CloseIO": NOT_FOUND, "Delete": NOT_FOUND,
    },
}  # fmt: skip


async def test_every_request_about_an_exec_is_answered_so_too(shim: ShimByHand) -> None:
    await shim.run("c1")
    more: dict[str, dict[str, Any]] = {"Kill": {"signal": 9}, "CloseIO": {"stdin": True}}

    async def answers(state: str) -> dict[str, int]:
        fields: dict[str, Any] = {"id": "c1", "exec_id": "e1"}
        return {
            method: await outcome(shim.call(method, **fields, **more.get(method, {})))
            for method in _OF_AN_EXEC[state]
        }

    await shim.exec("c1", "e1", "sleep", "1000")
    assert await answers("added") == _OF_AN_EXEC["added"]
    await shim.call("Start", id="c1", exec_id="e1")
    assert await answers("running") == _OF_AN_EXEC["running"]
    assert (await shim.call("Wait", id="c1", exec_id="e1")).exit_status == 137
    assert await answers("stopped") == _OF_AN_EXEC["stopped"]
    assert await answers("deleted") == _OF_AN_EXEC["deleted"]


async def test_a_refusal_about_an_exec_says_so(shim: ShimByHand) -> None:
    await shim.run("c1")
    await shim.start_exec("c1", "e1", "sleep", "1000")
    running = "cannot delete exec e1 of c1: it is running. Kill it first"
    with pytest.raises(RemoteError, match=running):
        await shim.call("Delete", id="c1", exec_id="e1")
    with pytest.raises(RemoteError, match=r"exec id '\.\./e2'"):
        await shim.exec("c1", "../e2", "true")


# -- created ----------------------------------------------------------------------------------


@pytest.mark.parametrize("low_level", ["runc", "crun"])
@pytest.mark.parametrize("end", ["Start", "Kill", "Delete"])
async def test_an_exec_in_a_created_container_runs_before_its_program(
    start_shim: StartShim, low_level: str, end: str
) -> None:
    """As a client does that sets something up in the container's namespaces first."""
    async with start_shim("c1", "sleep", "1000", for_crun=low_level == "crun") as shim:
        init = await shim.create("c1", options=shim.options(low_level))
        await shim.start_exec("c1", "e1", "sh", "-c", "exit 6")
        assert await shim.reap("c1", "e1") == 6
        exec_pid = await shim.start_exec("c1", "e2", "sleep", "1000")
        state = await shim.call("State", id="c1", exec_id="e2")
        assert (state.id, state.pid) == ("e2", exec_pid)
        assert await shim.status("c1") == "CREATED"
        pids = (await shim.call("Pids", id="c1")).processes
        assert {process.pid for process in pids} == {init, exec_pid}
        told = ["TaskCreate", "TaskExecAdded e1", "TaskExecStarted e1", "TaskExit e1"]
        told += ["TaskExecAdded e2", "TaskExecStarted e2"]
        if end == "Start":
            await shim.call("Start", id="c1")
            told.append("TaskStart")
        if end == "Delete":
            await shim.call("Delete", id="c1")
        else:
            await shim.end("c1")
        assert not is_alive(exec_pid)
        await gone(shim, "c1")
        assert shim.events.of("c1") == [*told, "TaskExit e2", "TaskExit", "TaskDelete"]


# -- paused -----------------------------------------------------------------------------------


async def test_execs_stand_still_with_a_paused_container_and_none_begins(
    shim: ShimByHand,
) -> None:
    await shim.run("c1")
    script = "while :; do date +%s%N > /now; done"
    await shim.exec("c1", "e1", "sh", "-c", script)
    await shim.exec("c1", "e2", "true")
    await shim.call("Start", id="c1", exec_id="e1")
    now = f"{shim.directory}/c1/rootfs/now"
    wait_for_file(now)
    await shim.call("Pause", id="c1")
    before = content_of(now)
    with anyio.fail_after(60):
        started = await outcome(shim.call("Start", id="c1", exec_id="e2"))
        added = await outcome(shim.exec("c1", "e3", "true"))
    assert (started, added) == (WRONG, WRONG)
    assert await shim.status("c1") == "PAUSED"
    assert await shim.status("c1", "e1") == "PAUSED"
    assert await shim.status("c1", "e2") == "CREATED"
    assert content_of(now) == before
    with pytest.raises(RemoteError, match="cannot delete c1: it is paused"):
        await shim.call("Delete", id="c1")
    await shim.call("Resume", id="c1")
    assert await shim.status("c1", "e1") == "RUNNING"
    await shim.call("Start", id="c1", exec_id="e2")
    assert (await shim.call("Wait", id="c1", exec_id="e2")).exit_status == 0
    await shim.end("c1")
    await gone(shim, "c1")
    told = [name for name in shim.events.of("c1") if "e1" not in name and "e2" not in name]
    assert told == [*LIFE[:2], "TaskPaused", "TaskResumed", *LIFE[2:]]


async def test_a_pause_lets_an_exec_that_is_being_started_come_to_its_start(
    shim: ShimByHand,
) -> None:
    await shim.run("c1", options=shim.options(before='[ "$verb" = exec ] && sleep 0.4'))
    await shim.exec("c1", "e1", "sleep", "1000")
    await shim.exec("c1", "e2", "true")
    outcomes: dict[str, int] = {}

    async def ask(name: str, call: Awaitable[Any]) -> None:
        outcomes[name] = await outcome(call)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "e1", shim.call("Start", id="c1", exec_id="e1"))
            await anyio.sleep(0.1)
            tasks.start_soon(ask, "pause", shim.call("Pause", id="c1"))
            await anyio.sleep(0.1)
            tasks.start_soon(ask, "e2", shim.call("Start", id="c1", exec_id="e2"))
    assert outcomes == {"e1": OK, "pause": OK, "e2": WRONG}
    assert await shim.status("c1") == "PAUSED"
    assert await shim.status("c1", "e1") == "PAUSED"
    await shim.call("Resume", id="c1")


@pytest.mark.parametrize("everyone", [False, True], ids=["init", "all"])
async def test_a_paused_container_can_be_killed(shim: ShimByHand, *, everyone: bool) -> None:
    await shim.run("c1")
    await shim.call("Pause", id="c1")
    await shim.call("Kill", id="c1", signal=9, all=everyone)
    with anyio.fail_after(60):
        assert (await shim.call("Wait", id="c1")).exit_status == 137
    await shim.call("Delete", id="c1")
    await gone(shim, "c1")
    assert shim.events.of("c1") == [*LIFE[:2], "TaskPaused", *LIFE[2:]]


# -- pid namespaces ---------------------------------------------------------------------------


async def test_what_shares_another_containers_pid_namespace_dies_with_its_own_init_alone(
    start_shim: StartShim,
) -> None:
    pod: dict[str, Any] = {"annotations": {"io.kubernetes.cri.sandbox-id": "pod"}}
    async with start_shim("pause", "sleep", "1000", **pod) as shim:
        holder = await shim.run("pause")
        for name, script in (
            ("c1", "sleep 1234567 & sleep 1234567 & echo $! > /pid; sleep 1000"),
            ("c2", "sleep 1000"),
        ):
            shim.bundle(name, "sh", "-c", script, **pod)
            spec = shim.spec(name)
            for namespace in spec["linux"]["namespaces"]:
                if namespace["type"] == "pid":
                    namespace["path"] = f"/proc/{holder}/ns/pid"
            shim.write_spec(name, spec)
            await shim.run(name)
        wait_for_file(f"{shim.directory}/c1/rootfs/pid")
        await shim.start_exec("c1", "e1", "sleep", "1000")
        pids = [p.pid for p in (await shim.call("Pids", id="c1")).processes]
        assert len(pids) >= 4, "init, its background child, and the exec"
        await shim.call("Kill", id="c1", signal=9)
        assert (await shim.call("Wait", id="c1")).exit_status == 137
        with anyio.fail_after(60):
            while any(map(is_alive, pids)):  # noqa: ASYNC110 - seen from outside
                await anyio.sleep(0.01)
        assert [await shim.status(name) for name in ("pause", "c2")] == ["RUNNING"] * 2
        await shim.call("Delete", id="c1")
        for name in ("c2", "pause"):
            await shim.end(name)
        await gone(shim, "pause")
        told = shim.events.of("c1")
        assert told[-3:] == ["TaskExit e1", "TaskExit", "TaskDelete"]


# -- signals to the shim ----------------------------------------------------------------------


async def test_sigusr1_tells_what_there_is(shim: ShimByHand) -> None:
    pid = await shim.run("c1")
    await shim.exec("c1", "e1", "true")
    lines = [line for line in await shim.log_lines("c1", ask=signal.SIGUSR1) if "container" in line]
    assert any(f"state=running pid={pid}" in line for line in lines)
    assert any("exec=e1 state=created pid=0" in line for line in lines)


async def test_sigterm_lets_what_is_asked_be_answered_and_events_arrive(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "sh", "-c", "exit 3") as shim:
        slow = '[ "$verb" = start ] && { echo yes > ${0%/*}/starts; sleep 0.3; }'
        await shim.create("c1", options=shim.options(before=slow))
        answered = []

        async def start() -> None:
            answered.append((await shim.call("Start", id="c1")).pid)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(start)
            await anyio.to_thread.run_sync(wait_for_file, f"{shim.directory}/starts")
            os.kill(shim.pid, signal.SIGTERM)
        await shim.until_gone()
        assert len(answered) == 1
        assert shim.events.names[:2] == LIFE[:2]
        assert not os.path.exists(shim.socket_path)
        await anyio.to_thread.run_sync(shim.delete_verb, "c1")


async def test_a_pause_behind_the_shims_back_is_not_an_end(shim: ShimByHand) -> None:
    await shim.run("c1")
    root = f"/run/containerd/runc/{NAMESPACE}"
    await anyio.run_process(["runc", "--root", root, "pause", "c1"])
    assert await outcome(shim.call("Pause", id="c1")) == WRONG  # not NOT_FOUND
    await anyio.run_process(["runc", "--root", root, "resume", "c1"])
    await shim.call("Pause", id="c1")
    await shim.call("Resume", id="c1")
