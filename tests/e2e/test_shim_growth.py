"""What children inherit from a shim, and what a shim keeps of them: only what is needed."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

import anyio
import pytest

from integration.timeouts import PATIENCE
from tests.harness.runtime import is_alive
from tests.harness.shim import ShimByHand, StartShim, content_of
from tests.harness.waiting import eventually, settled

pytestmark = pytest.mark.anyio


# -- what children get ----------------------------------------------------------------------


def _has_three(pid: int) -> bool:
    return sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2"]


async def test_a_container_has_no_descriptor_but_its_own_three(shim: ShimByHand) -> None:
    environment = f"{shim.directory}/environment"
    dump = f'[ "$verb" = create ] && {{ env; ls -l /proc/self/fd; }} > {environment}'
    pid = await shim.run(
        "c1", options=shim.options(before=dump), stdout=shim.fifo("out"), stdin=shim.fifo("in")
    )
    exec_pid = await shim.start_exec("c1", "e1", "sleep", "1000")
    for each in (pid, exec_pid):
        # runc has returned, but its child may not have executed the program yet.
        eventually(functools.partial(_has_three, each), f"{each} has its three alone")
    lines = content_of(environment).decode().splitlines()
    names = {line.partition("=")[0] for line in lines if "=" in line}
    assert names - {"PWD", "OLDPWD", "SHLVL", "_"} == {"PATH", "LANG"}


async def test_no_zombie_stays_of_what_a_container_leaves_behind(start_shim: StartShim) -> None:
    script = "for i in $(seq 50); do (setsid true &) ; done; sleep 1000"
    async with start_shim("c1", "sh", "-c", script, shared_pids=True) as shim:
        pid = await shim.run("c1")
        await shim.start_exec("c1", "e1", "sh", "-c", "for i in 1 2 3; do (sleep 0.1 &); done")
        await shim.call("Wait", id="c1", exec_id="e1")

        def zombies() -> list[str]:
            return [child for child in shim.children() if child.endswith("Z")]

        # The execs' last children end a tenth of a second later.
        await anyio.sleep(0.5)
        assert settled(zombies, []) == []
        assert is_alive(pid)
        await shim.end("c1")
        assert settled(shim.children, []) == []


# -- growth ---------------------------------------------------------------------------------


async def _tasks(shim: ShimByHand) -> int:
    """Return how many tasks the shim reports."""
    lines = await shim.log_lines("c0", ask=signal.SIGUSR1)
    return sum("msg=task" in line for line in lines)


async def _tasks_at_rest(shim: ShimByHand, most: int = 0) -> int:
    """Return how many tasks stay; wait for tasks that finish soon after their result is visible."""
    count = await _tasks(shim)
    with anyio.move_on_after(5 * PATIENCE):
        while count > most:
            await anyio.sleep(0.2)
            before, count = count, await _tasks(shim)
            if not most and count >= before:
                break
    return count


def _memory(shim: ShimByHand) -> int:
    """Return the shim's own memory, in KiB."""
    with open(f"/proc/{shim.pid}/smaps_rollup", encoding="ascii") as file:
        rows = [line.split() for line in file]
    return sum(int(row[1]) for row in rows if row[0] in ("Private_Dirty:", "Private_Clean:"))


async def test_execs_and_resizes_leave_no_descriptor_task_or_memory(
    start_shim: StartShim,
) -> None:
    async with start_shim("c0", "sleep", "1000", debug=True) as shim:
        await shim.run("c0")
        await shim.until_loaded("c0")

        async def execs(count: int) -> None:
            for number in range(count):
                terminal = bool(number % 2)
                await shim.start_exec("c0", f"e{number}", "true", terminal=terminal)
                for width in range(5):
                    size: dict[str, Any] = {"width": width + 1, "height": 9}
                    await shim.call("ResizePty", id="c0", exec_id=f"e{number}", **size)
                await shim.reap("c0", f"e{number}")

        await execs(20)
        before = await shim.files_at_rest(), await _tasks_at_rest(shim), _memory(shim)
        await execs(100)
        assert await shim.files_at_rest(before[0]) == before[0]
        assert await _tasks_at_rest(shim, before[1]) <= before[1]
        assert _memory(shim) - before[2] < 500
        assert settled(lambda: shim.children()[1:], []) == []


async def test_containers_leave_no_descriptor_task_or_memory(start_shim: StartShim) -> None:
    async with start_shim("c0", "sleep", "1000", debug=True) as shim:
        await shim.run("c0")
        await shim.until_loaded("c0")
        shim.bundle("c1", "true")
        stdout = shim.fifo("out")

        async def lives(count: int) -> None:
            for _ in range(count):
                await shim.run("c1", stdout=stdout)
                await shim.reap("c1")
                await shim.call("Shutdown", id="c1")

        await lives(10)
        await shim.events.until("TaskDelete", count=10)
        before = await shim.files_at_rest(), await _tasks_at_rest(shim), _memory(shim)
        await lives(40)
        await shim.events.until("TaskDelete", count=50)
        assert await shim.files_at_rest(before[0]) == before[0]
        assert await _tasks_at_rest(shim, before[1]) <= before[1]
        assert _memory(shim) - before[2] < 500


async def test_a_large_spec_leaves_no_memory(start_shim: StartShim) -> None:
    async with start_shim("c0", "sleep", "1000", debug=True) as shim:
        await shim.run("c0")
        await shim.until_loaded("c0")

        async def live(name: str, annotations: dict[str, str]) -> int:
            shim.bundle(name, "true", annotations=annotations)
            await shim.run(name)
            await shim.reap(name)
            return _memory(shim)

        before = await live("c1", {})
        assert await live("c2", {f"a{n}": "x" * 1_000_000 for n in range(8)}) - before < 1000


async def test_an_idle_shim_makes_no_system_call(start_shim: StartShim) -> None:
    async with start_shim("c1", "sleep", "1000", debug=True) as shim:
        await shim.run("c1")
        await shim.events.until("TaskStart")
        await shim.until_loaded("c1")
        await anyio.sleep(0.5)
        trace = f"{shim.directory}/trace"
        argv = ["timeout", "3", "strace", "-f", "-qq", "-o", trace, "-p", str(shim.pid)]
        for _ in range(20):
            await anyio.run_process(argv, check=False)
            lines = content_of(trace).decode().splitlines()
            calls = [line for line in lines if "exited" not in line]
            # Other tests on this machine connect to each socket to find shims, as an installation
            # does. Then the shim is not idle, and the test looks again.
            if not any("accept4(" in line for line in calls):
                break
        # The system call that the shim waited in before and after.
        assert len(calls) <= 1, calls


@pytest.mark.parametrize("terminal", [False, True], ids=["plain", "terminal"])
async def test_execs_that_nobody_deletes_keep_no_descriptor(
    shim: ShimByHand, *, terminal: bool
) -> None:
    await shim.run("c1")
    names = {"stdin": shim.fifo("in"), "stdout": shim.fifo("out")}
    reader = os.open(names["stdout"], os.O_RDONLY | os.O_NONBLOCK)

    async def cut_off(number: int) -> None:
        exec_id = f"e{number}"
        await shim.start_exec("c1", exec_id, "echo", "hello", terminal=terminal, **names)
        await shim.call("Wait", id="c1", exec_id=exec_id)
        await anyio.wait_readable(reader)  # a terminal's output may come after the exit
        assert os.read(reader, 100).startswith(b"hello")

    await cut_off(0)
    before = await shim.files_at_rest()
    for number in range(1, 6):
        await cut_off(number)
    assert await shim.files_at_rest(before) == before
    for number in range(6):
        await shim.call("Delete", id="c1", exec_id=f"e{number}")
    os.close(reader)
