"""Out-of-memory events: when they are sent, for which container, and in which order."""

from __future__ import annotations

import os
import signal

import anyio
import pytest

from api import typeurl
from tests.harness.cgroup import is_v2, read_cgroup
from tests.harness.shim import CGROUP, ShimByHand, StartShim

pytestmark = pytest.mark.anyio

LIMIT = 16 << 20

# tail buffers its endless input.
GREEDY = ("tail", "/dev/zero")


def _limit(shim: ShimByHand, container_id: str, memory: int | None = LIMIT) -> None:
    spec = shim.spec(container_id)
    spec["linux"]["resources"]["memory"] = {"limit": memory, "swap": memory} if memory else {}
    shim.write_spec(container_id, spec)


def _memory_directory(pid: int) -> str:
    with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
        paths = {line.split(":")[1]: line.rstrip("\n").split(":", 2)[2] for line in file}
    return f"/sys/fs/cgroup{paths['']}" if is_v2() else f"/sys/fs/cgroup/memory{paths['memory']}"


def _write(path: str, content: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(content)


async def test_init_that_is_killed_at_once_is_told_before_its_exit(start_shim: StartShim) -> None:
    async with start_shim("c1", *GREEDY) as shim:
        before: list[str] = []
        for number in range(2):  # and a container of the same name gets its own event
            _limit(shim, "c1")
            await shim.create("c1")
            await shim.call("Start", id="c1")
            assert await shim.reap("c1") == 128 + signal.SIGKILL
            await shim.events.until("TaskDelete", count=number + 1)
            assert shim.events.names[-5:] == [
                "TaskCreate", "TaskStart", "TaskOOM", "TaskExit", "TaskDelete",
            ]  # fmt: skip
            # Includes the connection to containerd, which the first event has opened.
            before = before or shim.open_files()
        assert len(shim.events.names) == 10
        assert await shim.files_at_rest(before) == before
        assert not [name for name in before if "eventfd" in name]


async def test_what_is_killed_while_the_runtime_starts_is_told_after_the_start(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "sh", "-c", "tail /dev/zero; sleep 1000") as shim:
        _limit(shim, "c1")
        # The runtime returns long after the container's program was executed.
        slow = 'if [ "$verb" = start ]; then $binary "$@"; sleep 1; exit 0; fi'
        await shim.create("c1", options=shim.options(before=slow))
        await shim.call("Start", id="c1")
        await shim.events.until("TaskOOM")
        assert shim.events.names == ["TaskCreate", "TaskStart", "TaskOOM"]


async def test_every_killed_process_is_told_while_the_container_runs_on(
    start_shim: StartShim,
) -> None:
    # The shim sends one event for kills that it sees together, so the next one waits for the event.
    script = "for i in 1 2 3; do read line < /start; tail /dev/zero; done; sleep 1000"
    async with start_shim("c1", "sh", "-c", script) as shim:
        _limit(shim, "c1")
        begin = os.path.join(shim.directory, "c1", "rootfs", "start")
        os.mkfifo(begin)
        await shim.run("c1")
        for number in range(3):
            _write(begin, "\n")
            await shim.events.until("TaskOOM", count=number + 1)
        await anyio.sleep(0.8)  # no event is repeated
        assert shim.events.names.count("TaskOOM") == 3
        assert await shim.end("c1") == 128 + signal.SIGKILL
        await shim.events.until("TaskDelete")
        assert shim.events.names == [
            "TaskCreate", "TaskStart", *["TaskOOM"] * 3, "TaskExit", "TaskDelete",
        ]  # fmt: skip


async def test_exec_that_is_killed_is_told_before_its_exit(shim: ShimByHand) -> None:
    _limit(shim, "c1")
    await shim.run("c1")
    await shim.start_exec("c1", "e1", *GREEDY)
    assert await shim.reap("c1", "e1") == 137
    # A signal from another process causes no event.
    await shim.start_exec("c1", "e2", "sleep", "1000")
    await shim.call("Kill", id="c1", exec_id="e2", signal=signal.SIGKILL)
    await shim.call("Wait", id="c1", exec_id="e2")
    await shim.end("c1")
    await shim.events.until("TaskDelete")
    told = shim.events.of("c1")
    # It may be killed before its start event.
    assert told.index("TaskExecStarted e1") < told.index("TaskExit e1")
    assert told.index("TaskOOM") < told.index("TaskExit e1")
    assert told.count("TaskOOM") == 1


async def test_limit_of_the_pod_is_told_of_the_container_that_was_killed_for_it(
    shim: ShimByHand,
) -> None:
    shim.bundle("c2", "sleep", "1000")
    for name in ("c1", "c2"):
        _limit(shim, name, None)
        pid = await shim.run(name)
    pod = os.path.dirname(_memory_directory(pid))
    assert pod.endswith(CGROUP)
    names = ["memory.max"] if is_v2() else ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
    for name in names:
        _write(os.path.join(pod, name), str(LIMIT))
    await shim.start_exec("c2", "e1", *GREEDY)
    assert await shim.reap("c2", "e1") == 137
    for name in ("c1", "c2"):
        await shim.end(name)
    await shim.events.until("TaskDelete", count=2)
    assert "TaskOOM" in shim.events.of("c2")
    assert "TaskOOM" not in shim.events.of("c1")


async def test_process_in_a_cgroup_below_the_containers_is_the_containers(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "sh", "-c", "read line < /start; exec tail /dev/zero") as shim:
        _limit(shim, "c1")
        begin = os.path.join(shim.directory, "c1", "rootfs", "start")
        os.mkfifo(begin)
        pid = await shim.run("c1")
        below = os.path.join(_memory_directory(pid), "below")
        os.mkdir(below)
        _write(os.path.join(below, "cgroup.procs"), str(pid))
        _write(begin, "\n")
        await shim.call("Wait", id="c1")
        os.rmdir(below)
        await shim.call("Delete", id="c1")
        await shim.events.until("TaskDelete")
        assert shim.events.names[2:4] == ["TaskOOM", "TaskExit"]


# test_metrics.py tests runc.
async def test_limits_are_changed_by_crun_and_devices_stay(shim: ShimByHand) -> None:
    _limit(shim, "c1")
    pid = await shim.run("c1", options=shim.options("crun"))
    devices = None if is_v2() else read_cgroup(pid, "devices", v1="devices.list", v2="")
    limits = {
        "memory": {"limit": LIMIT // 2, "swap": None},
        "pids": {"limit": 33},
        "devices": [{"allow": False, "access": "rwm"}],
    }
    resources = typeurl.pack_json(limits, typeurl.LINUX_RESOURCES)
    await shim.call("Update", id="c1", resources=resources, annotations={"a": "b"})
    memory = read_cgroup(pid, "memory", v1="memory.limit_in_bytes", v2="memory.max")
    assert memory == f"{LIMIT // 2}\n"
    assert read_cgroup(pid, "pids", v1="pids.max", v2="pids.max") == "33\n"
    if devices is not None:
        assert read_cgroup(pid, "devices", v1="devices.list", v2="") == devices
    await shim.end("c1")
    assert os.listdir(os.path.join(shim.directory, "c1", "rootfs"))
