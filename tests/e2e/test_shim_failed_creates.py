"""Failed creates, the shim's exit, events that are not delivered, and all of it at once."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import anyio
import pytest

from api.errors import Status
from api.ttrpc import ConnectionClosed, RemoteError
from api.ttrpc.client import connect
from tests.e2e.forgetful import FORGET_THE_TERMINAL
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
from tests.harness.stdio import reading
from tests.harness.waiting import settled

pytestmark = pytest.mark.anyio


def _die_halfway(runc_root: str, then: str) -> str:
    """Return a runtime that is killed while it creates c1, with cgroups and a child left."""
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
    "runtime dies in making and in deleting": {
        "before": '[ "$verb" = create ] && $binary "$@"; kill -9 $$',
        "rootfs": ["image"],
    },
    "runtime dies halfway": {"before": _die_halfway(RUNC_ROOT, ":"), "rootfs": ["image"]},
    "runtime dies halfway, without a state": {
        "before": _die_halfway(RUNC_ROOT, f"rmdir {RUNC_ROOT}/c1"),
        "rootfs": ["image"],
    },
    "no terminal": {"before": FORGET_THE_TERMINAL, "terminal": True, "rootfs": ["image"]},
}


# Failures that a thread undoes: the first thread opens one more file for the loop.
_BY_A_THREAD: Final = [name for name in _FAILURES if "halfway" in name or "deleting" in name]


@pytest.mark.parametrize("failure", _FAILURES)
async def test_a_create_that_fails_leaves_nothing_and_can_be_made_again(
    shim: ShimByHand, failure: str
) -> None:
    fields = dict(_FAILURES[failure])
    env = [fields.pop("env")] if "env" in fields else []
    spec = shim.spec("c1")
    clean = {**spec, "process": {**spec["process"], "env": list(spec["process"]["env"])}}
    spec["process"]["env"] += env
    shim.write_spec("c1", spec)
    image = f"{shim.directory}/image"
    os.rename(f"{shim.directory}/c1/rootfs", image)
    os.mkdir(f"{shim.directory}/c1/rootfs")
    bind = {"type": "bind", "source": image, "options": ["rbind", "rw"]}
    fields["rootfs"] = [bind if m == "image" else m for m in fields.get("rootfs", [bind])]
    fields["options"] = shim.options(fields.pop("binary", "runc"), before=fields.pop("before", ""))
    bundle_before = sorted(os.listdir(f"{shim.directory}/c1"))
    open_before = await shim.files_at_rest()
    if failure in _BY_A_THREAD:
        open_before = sorted([*open_before, "anon_inode:[eventfd]"])
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


@pytest.mark.parametrize("kind", ["fifo", "file"])
async def test_what_a_runtime_says_of_its_failure_is_in_the_error_and_in_no_log(
    shim: ShimByHand, kind: str
) -> None:
    """The same as with containerd's own shim; scripts match the first words of a failed create."""
    spec = shim.spec("c1")
    spec["process"]["args"] = ["/no/such/program"]
    shim.write_spec("c1", spec)
    if kind == "fifo":
        output, path = shim.fifo("err"), None
        reader = os.open(output, os.O_RDONLY | os.O_NONBLOCK)
    else:
        path = f"{shim.directory}/err"
        output = f"file://{path}"
    with pytest.raises(RemoteError) as caught:
        await shim.create("c1", stderr=output)
    assert caught.value.message.startswith("OCI runtime create failed: NVSHIM-E1203 ")
    assert "/no/such/program" in caught.value.message
    if path is not None:
        assert content_of(path) == b""
    else:
        assert os.read(reader, 4096) == b"", "the end, and nothing before it"
        os.close(reader)
    # The container's own output arrives.
    spec["process"]["args"] = ["sh", "-c", "echo from the container >&2"]
    shim.write_spec("c1", spec)
    if path is None:
        with reading(output) as path:
            await shim.run("c1", stderr=output)
            await shim.reap("c1")
    else:
        await shim.run("c1", stderr=output)
        await shim.reap("c1")
    assert content_of(path) == b"from the container\n"


@pytest.mark.parametrize("failure", ["mount", "injection", "stdio", "no runtime", "no terminal"])
async def test_a_create_that_fails_says_so_first(shim: ShimByHand, failure: str) -> None:
    fields = dict(_FAILURES[failure])
    spec = shim.spec("c1")
    spec["process"]["env"] += [fields.pop("env")] if "env" in fields else []
    shim.write_spec("c1", spec)
    fields.pop("rootfs", None) if failure != "mount" else None
    fields["options"] = shim.options(fields.pop("binary", "runc"), before=fields.pop("before", ""))
    with pytest.raises(RemoteError) as caught:
        await shim.create("c1", **fields)
    assert caught.value.message.startswith("OCI runtime create failed: NVSHIM-E")
    assert "\n" not in caught.value.message


async def test_a_create_that_finds_its_id_taken_leaves_the_other_container_alone(
    shim: ShimByHand,
) -> None:
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


async def test_a_runtime_that_is_killed_at_any_moment_leaves_nothing(shim: ShimByHand) -> None:
    for milliseconds in some(range(2, 60, 3)):
        # In the foreground: else timeout ends itself, too, and perhaps before runc.
        limit = f"timeout --foreground -s KILL 0.{milliseconds:03}"
        killed = f'[ "$verb" = create ] && exec {limit} runc "$@"'
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
    shim: ShimByHand,
) -> None:
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


@pytest.mark.parametrize("state", ["true", "rmdir"], ids=["with state", "without"])
async def test_a_runtime_and_its_shim_that_are_killed_halfway_leave_nothing(
    shim: ShimByHand, state: str
) -> None:
    # The shim dies first, so that only the verb can clean up.
    halfway = _die_halfway(RUNC_ROOT, f"{state} {RUNC_ROOT}/c1; kill -9 {shim.pid}")
    with suppress(ConnectionClosed):
        await shim.create("c1", options=shim.options(before=halfway))
    await shim.until_gone()
    shim.delete_verb("c1")


def _processes_with(text: str) -> list[str]:
    """Return the command lines of other processes that contain a text."""
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
            await shim.start_exec("c0", f"e{number}", "true")
            await shim.call("Wait", id="c0", exec_id=f"e{number}")
        shim.bundle("c1", "true")
        await shim.run("c1")
        await shim.reap("c1")
        await anyio.sleep(1)
        back = time.time_ns()
        warnings = [line for line in await shim.log_lines("c0") if "level=warning" in line]
        assert len(warnings) <= 2
        await tasks.start(shim.events.serve)
        await shim.events.until("TaskExit", count=31, seconds=20)
        await shim.events.until("TaskDelete", seconds=20)
        execs = [f"{kind} e{n}" for n in range(30) for kind in _EXEC]
        assert shim.events.of("c0") == [*LIFE[:2], *execs]
        assert shim.events.of("c1") == LIFE
        exits = [each for each in shim.events.envelopes if each.topic == "/tasks/exit"]
        assert all(each.timestamp.ToNanoseconds() < back for each in exits), "when they happened"
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
            await shim.reap("c1")
            await shim.call("Shutdown", id="c1")
            await shim.until_gone(seconds=4)


async def test_an_event_that_containerd_refuses_does_not_hold_up_those_behind_it(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "true") as shim:
        shim.events.refused.add("TaskStart")
        await shim.run("c1")
        await shim.reap("c1")
        await shim.events.until("TaskDelete", seconds=5)
        assert shim.events.names == [name for name in LIFE if name != "TaskStart"]
        assert any("topic=/tasks/start" in line for line in await shim.log_lines("c1"))


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


# The valid event sequences of one container with that id, and of its successor.
_TOLD: Final = re.compile(
    r"(TaskCreate (TaskStart |TaskExecAdded e1 |TaskExecStarted e1 |TaskExit e1 |TaskPaused |"
    r"TaskResumed )*TaskExit TaskDelete )*"
)


_EXEC_TOLD: Final = re.compile(r"((TaskExecAdded e1 )(TaskExecStarted e1 TaskExit e1 )?)*")


async def _end(shim: ShimByHand, container_id: str) -> None:
    """Delete a container in any state."""
    await outcome(shim.call("Resume", id=container_id))
    await outcome(shim.call("Kill", id=container_id, signal=9))
    if await outcome(shim.call("Wait", id=container_id)) == Status.OK:
        await outcome(shim.call("Delete", id=container_id))


@pytest.mark.parametrize("seed", seeds(1))
async def test_any_requests_in_any_order_at_once(start_shim: StartShim, seed: int) -> None:
    """Every overlapping request is answered, and events are sent once and in order."""
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
            await _end(shim, "c1")  # on a slow machine, one that was created later
        assert len(answered) == 60
        assert Status.INTERNAL not in answered
        # The first thread opens one more file for the loop: undoing a Create may need a thread.
        after = await shim.files_at_rest(before, may_have="anon_inode:[eventfd]")
        assert Counter(after) - Counter(before) <= Counter(["anon_inode:[eventfd]"])
        await shim.call("Delete", id="c0")
        await gone(shim, "c0")
        told = shim.events.of("c1")
        assert _TOLD.fullmatch("".join(f"{name} " for name in told)), told
        of_exec = [name for name in told if name.endswith("e1")]
        assert _EXEC_TOLD.fullmatch("".join(f"{name} " for name in of_exec)), of_exec
