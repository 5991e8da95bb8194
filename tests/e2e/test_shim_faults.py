"""What goes wrong, and what comes at the same moment: the shim under adverse conditions.

The shim is called by hand, so that requests can be made to overlap as no client means them to.
Where a step has to last, or to fail, the low-level runtime is a shell script before the real
one.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import anyio
import pytest

from api import typeurl
from api.errors import Status
from api.ttrpc import ConnectionClosed, RemoteError
from api.ttrpc.client import connect
from tests.harness.examples import seeds, some
from tests.harness.runtime import is_alive
from tests.harness.shim import (
    CGROUP,
    LIFE,
    RUNC_ROOT,
    ShimByHand,
    StartShim,
    content_of,
    gone,
    outcome,
)
from tests.harness.waiting import settled

pytestmark = pytest.mark.anyio


async def _at_once(*calls: Awaitable[Any], apart: float = 0.0) -> list[int]:
    """Make calls that overlap; returns their statuses in the order of the arguments."""
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
    start_shim: StartShim,
) -> None:
    # containerd deletes as soon as it is told of the exit, and then closes the connection.
    answered = []
    lingers = '[ "$verb" = kill ] && { $binary "$@"; status=$?; sleep 0.3; exit $status; }'
    async with start_shim("c1", "sleep", "1000") as shim:
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
        await gone(shim, "c1")


async def test_of_three_deletes_at_once_one_deletes_and_all_else_is_not_found(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "true") as shim:
        slow = shim.options(before='[ "$verb" = delete ] && sleep 0.2')
        await shim.run("c1", options=slow)
        await shim.call("Wait", id="c1")
        statuses = await _at_once(*(shim.call("Delete", id="c1") for _ in range(3)))
        assert sorted(statuses) == [Status.OK, Status.NOT_FOUND, Status.NOT_FOUND]
        await gone(shim, "c1")
        assert shim.events.names == LIFE


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
        await shim.call("Delete", id="c1")
        await gone(shim, "c1")


async def test_delete_waits_for_a_start_under_way_and_is_refused(start_shim: StartShim) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        await shim.create("c1", options=shim.options(before='[ "$verb" = start ] && sleep 0.3'))
        start, delete = shim.call("Start", id="c1"), shim.call("Delete", id="c1")
        assert await _at_once(start, delete, apart=0.1) == [Status.OK, Status.FAILED_PRECONDITION]
        assert await shim.status("c1") == "RUNNING"
        assert await shim.end("c1") == 137
        await gone(shim, "c1")
        assert shim.events.names == LIFE


async def test_start_during_delete_fails_and_the_container_goes(start_shim: StartShim) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        await shim.create("c1", options=shim.options(before='[ "$verb" = delete ] && sleep 0.3'))
        delete, start = shim.call("Delete", id="c1"), shim.call("Start", id="c1")
        statuses = await _at_once(delete, start, apart=0.1)
        assert statuses[0] == Status.OK
        assert statuses[1] in (Status.NOT_FOUND, Status.FAILED_PRECONDITION)
        await gone(shim, "c1")
        assert shim.events.names == ["TaskCreate", "TaskExit", "TaskDelete"]


async def test_delete_of_an_exec_waits_for_its_start_and_is_refused(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
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


async def test_of_two_deletes_of_an_exec_one_is_not_found(start_shim: StartShim) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        await shim.run("c1")
        stdout = shim.fifo("out")
        reader = os.open(stdout, os.O_RDONLY | os.O_NONBLOCK)
        await shim.exec("c1", "e1", "sh", "-c", "seq 30000", terminal=True, stdout=stdout)
        await shim.call("Start", id="c1", exec_id="e1")
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
        await shim.end("c1")
        await gone(shim, "c1")


async def test_kill_during_start_ends_it(start_shim: StartShim) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        await shim.create("c1", options=shim.options(before='[ "$verb" = start ] && sleep 0.2'))
        kill = shim.call("Kill", id="c1", signal=9)
        _, killed = await _at_once(shim.call("Start", id="c1"), kill, apart=0.1)
        assert killed == Status.OK
        assert (await shim.call("Wait", id="c1")).exit_status == 137
        await shim.call("Delete", id="c1")
        await gone(shim, "c1")
        assert [name for name in shim.events.names if name != "TaskStart"] == [LIFE[0], *LIFE[2:]]


@pytest.mark.parametrize("shared_pids", [False, True], ids=["own pids", "shared pids"])
async def test_an_exec_started_while_init_dies_ends_with_it(
    start_shim: StartShim, *, shared_pids: bool
) -> None:
    async with start_shim("c0", "sh", "-c", "sleep 0.2", shared_pids=shared_pids) as shim:
        # The runtime has looked at init while it lived, and goes on when it is dead.
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
            with anyio.fail_after(5):
                assert (await shim.call("Wait", id=name)).exit_status == 0
            await shim.call("Delete", id=name)
        await gone(shim, "c0")
        for number in range(6):
            assert shim.events.of(f"c{number}")[-2:] == LIFE[2:]


async def test_of_two_creates_of_one_id_one_exists_already(start_shim: StartShim) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        statuses = await _at_once(*(shim.create("c1") for _ in range(2)))
        assert sorted(statuses) == [Status.OK, Status.ALREADY_EXISTS]
        await shim.call("Delete", id="c1")
        await gone(shim, "c1")
        assert shim.events.names == ["TaskCreate", "TaskExit", "TaskDelete"]


async def test_of_two_starts_one_starts(start_shim: StartShim) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        await shim.create("c1")
        starts = await _at_once(*(shim.call("Start", id="c1") for _ in range(2)))
        assert sorted(starts) == [Status.OK, Status.FAILED_PRECONDITION]
        await shim.end("c1")
        await gone(shim, "c1")
        assert shim.events.names == LIFE


async def test_shutdown_during_create_does_nothing(start_shim: StartShim) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        slow = shim.options(before='[ "$verb" = create ] && sleep 0.3')
        calls = shim.create("c1", options=slow), shim.call("Shutdown", id="c1")
        assert await _at_once(*calls, apart=0.1) == [Status.OK, Status.OK]
        assert await shim.status("c1") == "CREATED"
        await shim.call("Delete", id="c1")
        await gone(shim, "c1")


async def test_a_create_right_after_shutdown_is_refused_and_leaves_nothing(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        _, created = await _at_once(shim.call("Shutdown", id="c1"), _lost(shim.create("c1")))
        assert created != Status.OK
        await shim.until_gone()
        assert shim.leftovers() == []


async def _lost(call: Awaitable[Any]) -> None:
    """A call that may find the shim gone."""
    try:
        await call
    except ConnectionClosed as error:
        raise RemoteError("", status=Status.UNAVAILABLE, message=str(error), details=()) from error


# -- execs that fail ------------------------------------------------------------------------


async def test_an_exec_that_fails_to_start_lets_go_of_those_who_wait_for_it(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        await shim.run("c1")
        await shim.exec("c1", "e1", "no-such-program")
        wait = shim.call("Wait", id="c1", exec_id="e1")
        start = shim.call("Start", id="c1", exec_id="e1")
        waited, started = await _at_once(wait, start, apart=0.1)
        assert (waited, started) == (Status.FAILED_PRECONDITION, Status.NOT_FOUND)
        late = shim.call("Wait", id="c1", exec_id="e1")
        assert await outcome(late) == Status.FAILED_PRECONDITION
        await shim.call("Delete", id="c1", exec_id="e1")
        await shim.end("c1")
        await gone(shim, "c1")
        assert shim.events.of("c1") == [*LIFE[:2], "TaskExecAdded e1", *LIFE[2:]]


async def test_a_start_that_failed_may_be_tried_again(start_shim: StartShim) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        once = 'f=${0%/*}/once; [ "$verb" = exec ] && [ ! -e $f ] && : > $f && exit 1'
        await shim.run("c1", options=shim.options(before=once))
        await shim.exec("c1", "e1", "sh", "-c", "sleep 0.2; exit 4")
        assert await outcome(shim.call("Start", id="c1", exec_id="e1")) == Status.UNKNOWN
        await shim.call("Start", id="c1", exec_id="e1")
        assert (await shim.call("Wait", id="c1", exec_id="e1")).exit_status == 4
        await shim.end("c1")
        await gone(shim, "c1")


@pytest.mark.parametrize("whole", [False, True], ids=["the exec", "the container"])
async def test_who_waits_for_an_exec_never_started_is_told_when_it_is_deleted(
    start_shim: StartShim, *, whole: bool
) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        await shim.run("c1")
        await shim.exec("c1", "e1", "true")

        async def delete() -> None:
            if whole:
                await shim.end("c1")
            else:
                await shim.call("Delete", id="c1", exec_id="e1")

        wait = shim.call("Wait", id="c1", exec_id="e1")
        assert await _at_once(wait, delete(), apart=0.1) == [Status.NOT_FOUND, Status.OK]
        if not whole:
            await shim.end("c1")
        await gone(shim, "c1")


async def test_an_exec_whose_terminal_does_not_come_is_ended(start_shim: StartShim) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        await shim.run("c1", options=shim.options(before=_FORGET_THE_TERMINAL))
        before = await shim.files_at_rest()
        await shim.exec("c1", "e1", "sleep", "999", terminal=True)
        assert await outcome(shim.call("Start", id="c1", exec_id="e1")) != Status.OK
        processes = (await shim.call("Pids", id="c1")).processes
        assert len(processes) == 1
        await shim.call("Delete", id="c1", exec_id="e1")
        assert await shim.files_at_rest(before) == before
        await shim.end("c1")
        await gone(shim, "c1")


async def test_a_malformed_exec_leaves_its_id_free(start_shim: StartShim) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        await shim.run("c1")
        for process in ({"args": 5, "cwd": "/"}, {"args": ["true"], "cwd": "/", "env": "none"}):
            spec = typeurl.pack_json(process, typeurl.PROCESS)
            added = await outcome(shim.call("Exec", id="c1", exec_id="e1", spec=spec))
            if added == Status.OK:
                start = shim.call("Start", id="c1", exec_id="e1")
                assert await outcome(start) not in (Status.OK, Status.INTERNAL)
                await shim.call("Delete", id="c1", exec_id="e1")
        await shim.exec("c1", "e1", "true")
        await shim.call("Start", id="c1", exec_id="e1")
        await shim.end("c1")
        await gone(shim, "c1")


@pytest.mark.parametrize("terminal", [False, True], ids=["plain", "terminal"])
async def test_an_exec_may_have_any_name_also_init(
    start_shim: StartShim, *, terminal: bool
) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        stdout = shim.fifo("out") if terminal else ""
        pid = await shim.run("c1", terminal=terminal, stdout=stdout)
        name = "init"
        await shim.exec("c1", name, "sh", "-c", "exit 6", terminal=terminal)
        await shim.call("Start", id="c1", exec_id=name)
        assert (await shim.call("Wait", id="c1", exec_id=name)).exit_status == 6
        assert int(content_of(f"{shim.directory}/c1/init.pid")) == pid
        await shim.call("Delete", id="c1", exec_id=name)
        await shim.end("c1")
        await gone(shim, "c1")


@pytest.mark.parametrize("number", [0xFFFFFFFF, 65, 1 << 31])
async def test_a_signal_that_there_is_not_is_refused(start_shim: StartShim, number: int) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        await shim.run("c1")
        await shim.exec("c1", "e1", "sleep", "1000")
        await shim.call("Start", id="c1", exec_id="e1")
        for exec_id in ("", "e1"):
            kill = shim.call("Kill", id="c1", exec_id=exec_id, signal=number)
            assert await outcome(kill) == Status.INVALID_ARGUMENT
        await shim.end("c1")


# -- a Create that fails --------------------------------------------------------------------

# The runtime is not told of the console socket, and the process has no terminal.
_FORGET_THE_TERMINAL: Final = """
for word do
  shift
  case $last in --console-socket) last= ; continue ;; esac
  last=$word
  [ "$word" = --console-socket ] || set -- "$@" "$word"
done
"""

_FAILURES: Final[dict[str, dict[str, Any]]] = {
    "mount": {"rootfs": [{"type": "bind", "source": "/no/such/source", "options": ["rbind"]}]},
    "second mount": {"rootfs": ["image", {"type": "bind", "source": "/no", "options": ["bind"]}]},
    "injection": {"env": "NVIDIA_VISIBLE_DEVICES=GPU-none"},
    "stdio": {"stdout": "/no/such/fifo", "rootfs": ["image"]},
    "scheme": {"stdout": "npipe:///x", "rootfs": ["image"]},
    "no runtime": {"binary": "/no/such/runc", "rootfs": ["image"]},
    "runtime fails": {"before": "exit 1", "rootfs": ["image"]},
    "runtime dies late": {
        "before": '[ "$verb" = create ] && { $binary "$@"; kill -9 $$; }',
        "rootfs": ["image"],
    },
    "no pid file": {
        "before": '[ "$verb" = create ] && { $binary "$@" && rm "${11}"; exit; }',
        "rootfs": ["image"],
    },
    "no terminal": {"before": _FORGET_THE_TERMINAL, "terminal": True, "rootfs": ["image"]},
}


@pytest.mark.parametrize("failure", _FAILURES)
async def test_a_create_that_fails_leaves_nothing_and_can_be_made_again(
    start_shim: StartShim, failure: str
) -> None:
    fields = dict(_FAILURES[failure])
    env = [fields.pop("env")] if "env" in fields else []
    async with start_shim("c1", "sleep", "1000") as shim:
        spec = shim.spec("c1")
        clean = {**spec, "process": {**spec["process"], "env": list(spec["process"]["env"])}}
        spec["process"]["env"] += env
        shim.write_spec("c1", spec)
        image = f"{shim.directory}/image"
        os.rename(f"{shim.directory}/c1/rootfs", image)
        os.mkdir(f"{shim.directory}/c1/rootfs")
        bind = {"type": "bind", "source": image, "options": ["rbind", "rw"]}
        fields["rootfs"] = [bind if m == "image" else m for m in fields.get("rootfs", [bind])]
        fields["options"] = shim.options(
            fields.pop("binary", "runc"), before=fields.pop("before", "")
        )
        bundle_before = sorted(os.listdir(f"{shim.directory}/c1"))
        open_before = await shim.files_at_rest()
        for _ in range(2):
            assert await outcome(shim.create("c1", **fields)) != Status.OK
        assert shim.leftovers() == [f"socket {shim.socket_path}", f"process {shim.pid}"]
        with anyio.fail_after(20):
            while shim.children():  # noqa: ASYNC110 - seen from outside
                await anyio.sleep(0.01)
        assert await shim.files_at_rest(open_before) == open_before
        harmless = {"options.json", "runtime"}
        assert sorted({*os.listdir(f"{shim.directory}/c1")} - harmless) == bundle_before
        shim.write_spec("c1", clean)
        await shim.run("c1", rootfs=[bind])
        await shim.end("c1")
        await gone(shim, "c1")
        assert shim.events.names == LIFE


async def test_a_create_that_finds_its_id_taken_leaves_the_other_container_alone(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        pid = await shim.run("c1")
        os.kill(shim.pid, signal.SIGTERM)
        await shim.until_gone()
        with suppress(FileNotFoundError):
            os.unlink(shim.socket_path)
        async with connect(shim.start_verb("c1")) as shim.client:
            shim.pid = (await shim.call("Connect", id="c1")).shim_pid
            assert await outcome(shim.create("c1")) != Status.OK
            assert is_alive(pid)
        os.kill(pid, signal.SIGKILL)


def _die_halfway(runc_root: str, then: str) -> str:
    """What a runtime does that is killed while it makes c1: its cgroups are there, and a child."""
    return f"""
if [ "$verb" = create ]; then
  mkdir -p {runc_root}/c1
  sleep 1000 < /dev/null > /dev/null 2>&1 &
  for hierarchy in $(awk '$9 ~ /^cgroup/ || $8 ~ /^cgroup/ {{print $5}}' /proc/self/mountinfo); do
    mkdir -p $hierarchy{CGROUP}/c1 2> /dev/null && echo $! > $hierarchy{CGROUP}/c1/cgroup.procs
  done
  {then}
  kill -9 $$
fi
"""


@pytest.mark.parametrize("state", ["true", "rmdir"], ids=["with state", "without"])
async def test_a_create_whose_runtime_is_killed_halfway_leaves_nothing(
    start_shim: StartShim, state: str
) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        halfway = _die_halfway(RUNC_ROOT, f"{state} {RUNC_ROOT}/c1")
        assert await outcome(shim.create("c1", options=shim.options(before=halfway))) != Status.OK
        assert shim.leftovers() == [f"socket {shim.socket_path}", f"process {shim.pid}"]
        await shim.run("c1")
        await shim.end("c1")
        await gone(shim, "c1")


async def test_a_runtime_that_is_killed_at_any_moment_leaves_nothing(start_shim: StartShim) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        for milliseconds in some(range(2, 60, 3)):
            killed = f'[ "$verb" = create ] && exec timeout -s KILL 0.{milliseconds:03} runc "$@"'
            options = shim.options(before=killed)
            if await outcome(shim.create("c1", options=options)) == Status.OK:
                await shim.call("Delete", id="c1")
            left = [f"socket {shim.socket_path}", f"process {shim.pid}"]
            assert shim.leftovers() == left, f"killed after {milliseconds} ms"


# -- the end of the shim ---------------------------------------------------------------------


@pytest.mark.parametrize("binary", ["runc", "crun"])
async def test_a_shim_killed_at_any_moment_leaves_nothing_once_delete_is_called(
    start_shim: StartShim, binary: str
) -> None:
    for milliseconds in some(range(0, 80, 5)):
        async with start_shim("c1", "sleep", "1000") as shim:
            image = f"{shim.directory}/image"
            os.rename(f"{shim.directory}/c1/rootfs", image)
            os.mkdir(f"{shim.directory}/c1/rootfs")
            bind = {"type": "bind", "source": image, "options": ["rbind", "rw"]}

            options = shim.options(binary)
            create = shim.create("c1", rootfs=[bind], options=options)

            async def live(shim: ShimByHand = shim, create: Awaitable[int] = create) -> None:
                with suppress(ConnectionClosed):
                    await create
                    await shim.call("Start", id="c1")

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(live)
                await anyio.sleep(milliseconds / 1000)
                os.kill(shim.pid, signal.SIGKILL)
            assert shim.delete_verb("c1") < 5
            assert settled(shim.leftovers, []) == [], f"killed after {milliseconds} ms"
            assert settled(partial(_processes_with, shim.directory), []) == []


async def test_a_create_that_outlives_its_shim_makes_nothing_that_stays(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        slow = shim.options(before='[ "$verb" = create ] && sleep 0.4')

        async def create() -> None:
            with suppress(ConnectionClosed):
                await shim.create("c1", options=slow)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(create)
            await anyio.sleep(0.1)
            os.kill(shim.pid, signal.SIGKILL)
        assert shim.delete_verb("c1") < 5
        await anyio.sleep(0.8)
        assert shim.leftovers() == []


@pytest.mark.parametrize("state", ["true", "rmdir"], ids=["with state", "without"])
async def test_a_runtime_and_its_shim_that_are_killed_halfway_leave_nothing(
    start_shim: StartShim, state: str
) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        # Its shim first, so that nobody but the verb finds what it has left.
        halfway = _die_halfway(RUNC_ROOT, f"{state} {RUNC_ROOT}/c1; kill -9 {shim.pid}")
        with suppress(ConnectionClosed):
            await shim.create("c1", options=shim.options(before=halfway))
        await shim.until_gone()
        shim.delete_verb("c1")
        assert shim.leftovers() == []


def _processes_with(text: str) -> list[str]:
    """The command lines, of processes other than this one, that contain a text."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            words = content_of(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace")
            if text in words:
                found.append(words)
    return found


# -- events ----------------------------------------------------------------------------------


async def test_no_event_is_lost_doubled_or_out_of_order_over_an_outage(
    start_shim: StartShim,
) -> None:
    async with start_shim("c0", "sleep", "1000") as shim, anyio.create_task_group() as tasks:
        await shim.run("c0")
        await shim.events.until("TaskStart")
        shim.events.stop()
        for number in range(30):
            await shim.exec("c0", f"e{number}", "true")
            await shim.call("Start", id="c0", exec_id=f"e{number}")
            await shim.call("Wait", id="c0", exec_id=f"e{number}")
        shim.bundle("c1", "true")
        await shim.run("c1")
        await shim.call("Wait", id="c1")
        await shim.call("Delete", id="c1")
        await anyio.sleep(1)
        warnings = [line for line in await shim.log_lines("c0") if "level=warning" in line]
        assert len(warnings) <= 2
        await tasks.start(shim.events.serve)
        await shim.events.until("TaskExit", count=31, seconds=20)
        await shim.events.until("TaskDelete", seconds=20)
        execs = [f"{kind} e{n}" for n in range(30) for kind in _EXEC]
        assert shim.events.of("c0") == [*LIFE[:2], *execs]
        assert shim.events.of("c1") == LIFE
        await shim.end("c0")
        await gone(shim, "c0")
        tasks.cancel_scope.cancel()


_EXEC: Final = ("TaskExecAdded", "TaskExecStarted", "TaskExit")


async def test_a_containerd_that_never_answers_events_does_not_hold_up_shutdown(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "true") as shim:
        shim.events.stop()
        await anyio.sleep(0.1)
        path = f"{shim.directory}/c.sock.ttrpc"
        with suppress(FileNotFoundError):
            os.unlink(path)
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(path)
            silent.listen()
            await shim.run("c1")
            await shim.call("Wait", id="c1")
            await shim.call("Delete", id="c1")
            await shim.call("Shutdown", id="c1")
            await shim.until_gone(seconds=4)
        assert shim.leftovers() == []


async def test_an_event_that_containerd_refuses_does_not_hold_up_those_behind_it(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "true") as shim:
        shim.events.refused.add("TaskStart")
        await shim.run("c1")
        await shim.call("Wait", id="c1")
        await shim.call("Delete", id="c1")
        await shim.events.until("TaskDelete", seconds=5)
        assert shim.events.names == [name for name in LIFE if name != "TaskStart"]
        assert any("topic=/tasks/start" in line for line in await shim.log_lines("c1"))
        await gone(shim, "c1")


# -- all of it at once -----------------------------------------------------------------------

_REQUESTS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("Create", {}),
    ("Start", {}),
    ("Start", {"exec_id": "e1"}),
    ("Kill", {"signal": 9}),
    ("Kill", {"signal": 9, "exec_id": "e1"}),
    ("Exec", {}),
    ("Delete", {}),
    ("Delete", {"exec_id": "e1"}),
    ("State", {}),
    ("Pids", {}),
    ("Pause", {}),
    ("Resume", {}),
    ("Shutdown", {}),
    ("Wait", {"exec_id": "e1"}),
    ("CloseIO", {"exec_id": "e1", "stdin": True}),
    ("ResizePty", {"width": 1, "height": 1}),
)

# What containerd may be told of one container of that id, and of what follows it under the id.
_TOLD: Final = re.compile(
    r"(TaskCreate (TaskStart |TaskExecAdded e1 |TaskExecStarted e1 |TaskExit e1 |TaskPaused |"
    r"TaskResumed )*TaskExit TaskDelete )*"
)
_EXEC_TOLD: Final = re.compile(r"((TaskExecAdded e1 )(TaskExecStarted e1 TaskExit e1 )?)*")


async def _end(shim: ShimByHand, container_id: str) -> None:
    """Delete a container, whatever its state."""
    await outcome(shim.call("Resume", id=container_id))
    await outcome(shim.call("Kill", id=container_id, signal=9))
    if await outcome(shim.call("Wait", id=container_id)) == Status.OK:
        await outcome(shim.call("Delete", id=container_id))


@pytest.mark.parametrize("seed", seeds(3))
async def test_any_requests_in_any_order_at_once(start_shim: StartShim, seed: int) -> None:
    """Whatever overlaps: every request is answered, events are told once and in order."""
    chance = random.Random(seed)
    shared = seed % 2 == 1
    async with start_shim("c0", "sleep", "1000", shared_pids=shared) as shim:
        await shim.create("c0")  # so that no Shutdown ends the shim
        await shim.events.until("TaskCreate")
        before = await shim.files_at_rest()
        shim.bundle("c1", "sh", "-c", f"sleep 0.{chance.randint(0, 5)}", shared_pids=shared)
        answered: list[int] = []

        async def request() -> None:
            method, fields = chance.choice(_REQUESTS)
            await anyio.sleep(chance.random() * 1.5)
            if method == "Create":
                call: Awaitable[Any] = shim.create("c1")
            elif method == "Exec":
                call = shim.exec("c1", "e1", "sleep", f"0.{chance.randint(0, 3)}")
            else:
                call = shim.call(method, id="c1", **fields)
            answered.append(await outcome(call))

        async def keep_going() -> None:
            for method in ("Create", "Start", "Exec", "Start e1") * 3:
                await anyio.sleep(0.1)
                name, _, exec_id = method.partition(" ")
                if name == "Create":
                    await outcome(shim.create("c1"))
                elif name == "Exec":
                    await outcome(shim.exec("c1", "e1", "sleep", "0.1"))
                else:
                    await outcome(shim.call("Start", id="c1", exec_id=exec_id))

        with anyio.fail_after(40):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(keep_going)
                for _ in range(60):
                    tasks.start_soon(request)
                await anyio.sleep(2)
                await _end(shim, "c1")
            await _end(shim, "c1")  # one that was made after that, on a slow machine
        assert len(answered) == 60
        assert Status.INTERNAL not in answered
        # The loop has one more from its first thread on: undoing a Create may need one.
        if (after := await shim.files_at_rest(before)) != before:
            assert Counter(after) - Counter(before) <= Counter(["anon_inode:[eventfd]"])
        await shim.call("Delete", id="c0")
        await gone(shim, "c0")
        told = shim.events.of("c1")
        assert _TOLD.fullmatch("".join(f"{name} " for name in told)), told
        of_exec = [name for name in told if name.endswith("e1")]
        assert _EXEC_TOLD.fullmatch("".join(f"{name} " for name in of_exec)), of_exec
