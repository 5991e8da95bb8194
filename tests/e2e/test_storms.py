"""Many containers at once, and containerd killed in the middle."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import time
from contextlib import suppress

import pytest

from api.proto.task_types_pb2 import Status
from tests.harness import api
from tests.harness.events import Recorder
from tests.harness.examples import seeds
from tests.harness.runtime import Runtime, is_alive, new_name, remove_fifos
from tests.harness.waiting import eventually

GROUP = "io.containerd.runc.v2.group"


@pytest.mark.parametrize("count", [40, pytest.param(100, marks=pytest.mark.thorough)])
def test_many_containers_at_once_are_created_run_and_deleted(runtime: Runtime, count: int) -> None:
    codes = {new_name(): number % 64 for number in range(count)}
    running = [
        runtime.containerd.spawn_ctr(
            *runtime.words("sh", "-c", f"exit {code}", name=name, flags=("--rm", "--null-io")),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for name, code in codes.items()
    ]
    ends = [(ctr.communicate(timeout=100)[1].decode(), ctr.returncode) for ctr in running]
    assert [said for said, _ in ends if said] == []
    assert [code for _, code in ends] == list(codes.values())
    eventually(lambda: runtime.containerd.shim_pids() == [], "every shim has exited")


def test_thirty_containers_of_a_pod_at_once_in_one_shim(runtime: Runtime) -> None:
    pod = new_name("pod")
    flags = ("--detach", "--null-io", "--annotation", f"{GROUP}={pod}")
    keeper = runtime.start_idle(flags=flags[1:])
    shims = runtime.containerd.shim_pids()
    with Recorder(runtime.containerd) as recorder:
        members = [runtime.expect() for _ in range(30)]
        running = [
            runtime.containerd.spawn_ctr(
                *runtime.words("sh", "-c", f"exit {number}", name=member.name, flags=flags)
            )
            for number, member in enumerate(members)
        ]
        assert [ctr.wait(60) for ctr in running] == [0] * 30
        assert [member.exit_code() for member in members] == list(range(30))
        for member in members:
            names = recorder.wait_for(member.name, lambda names: "delete" in names)
            assert names == ["create", "start", "exit", "delete"]
    assert runtime.containerd.shim_pids() == shims
    assert keeper.status == "RUNNING"


@pytest.mark.parametrize("seed", seeds(1))
def test_containerd_killed_while_containers_start_run_and_exit(runtime: Runtime, seed: int) -> None:
    dice = random.Random(seed)
    containerd = runtime.containerd
    codes: dict[str, int] = {}
    started = 0
    for _ in range(4):
        running = []
        for _ in range(6):
            container = runtime.expect()
            code = codes[container.name] = dice.randrange(1, 100)
            script = f"sleep {dice.uniform(0, 1.5):.2f}; exit {code}"
            flags = ("--detach", "--null-io")
            running.append(
                containerd.spawn_ctr(
                    *runtime.words("sh", "-c", script, name=container.name, flags=flags),
                    stderr=subprocess.DEVNULL,
                )
            )
            time.sleep(dice.uniform(0, 0.1))
        # On any machine: some have started, others have not.
        look = functools.partial(_started, runtime, more_than=started)
        started = eventually(look, "one more has started")
        containerd.kill()
        for ctr in running:
            ctr.wait(30)
        time.sleep(dice.uniform(0, 0.5))
        containerd.start()
    judged = 0
    for name, (pid, status) in _tasks(runtime).items():
        container = runtime.expect(name)
        if status == "CREATED":  # ctr was cut off between Create and Start
            assert is_alive(pid)
            continue
        judged += 1
        assert container.exit_code() == codes[name]
    assert judged >= 4, "the storm has to leave containers to judge"
    for container in [runtime.expect(name) for name in codes]:
        container.remove()
    _remove_what_ctr_left(runtime, codes)


def test_shims_answer_a_containerd_that_comes_back_within_its_budget(runtime: Runtime) -> None:
    """It sends each shim Connect and Pids at the same time, with five seconds for all of them."""
    containerd = runtime.containerd
    flags = ("--detach", "--null-io")
    starting = [
        containerd.spawn_ctr(*runtime.words("sleep", "1000", name=name, flags=flags))
        for name in [runtime.expect().name for _ in range(20)]
    ]
    assert [ctr.wait(100) for ctr in starting] == [0] * 20
    tasks, shims = _tasks(runtime), containerd.shim_pids()
    assert len(shims) == 20
    containerd.kill()
    before = sum(map(_processor_seconds, shims))
    containerd.start()
    assert _tasks(runtime) == tasks
    assert containerd.shim_pids() == shims
    # Use processor time, because the clock also counts other processes. A hundred shims that share
    # one processor are then in time with ease.
    each = (sum(map(_processor_seconds, shims)) - before) / 20
    assert 0 < each * 100 < 1


def _processor_seconds(pid: int) -> float:
    """Return the processor time of a process in all its threads."""
    used = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
            used += int(file.read().split()[0])
    return used / 1e9


def test_containerd_killed_over_and_over_under_a_pod(runtime: Runtime) -> None:
    pod = new_name("pod")
    flags = ("--null-io", "--annotation", f"{GROUP}={pod}")
    members = [runtime.start_idle(flags=flags) for _ in range(3)]
    inits = [member.pid for member in members]
    shims = runtime.containerd.shim_pids()
    for number, member in enumerate(members):
        runtime.containerd.kill()
        if number:
            os.kill(inits[number], 9)
        runtime.containerd.start()
        assert runtime.containerd.shim_pids() == shims
        member.wait_for("STOPPED" if number else "RUNNING")
    assert members[0].exec("sh", "-c", "exit 4").code == 4
    assert [member.exit_code() for member in members[1:]] == [137, 137]
    assert members[0].status == "RUNNING"


def _tasks(runtime: Runtime) -> dict[str, tuple[int, str]]:
    """Return containerd's tasks: pid and status by name."""
    tasks = api.tasks(runtime.containerd)
    return {name: (task.pid, Status.Name(task.status)) for name, task in tasks.items()}


def _started(runtime: Runtime, *, more_than: int) -> int:
    """Return how many tasks have started; 0 if that is at most ``more_than``."""
    started = sum(status != "CREATED" for _, status in _tasks(runtime).values())
    return started if started > more_than else 0


def _remove_what_ctr_left(runtime: Runtime, names: dict[str, int]) -> None:
    """Remove leftovers that no shim is responsible for.

    A ``ctr`` that was killed before it created its container has left the snapshot. A containerd
    that was killed between the start of a shim and its Create has left a shim without tasks: it
    exits after a minute, which another test covers, or when it is told to.
    """
    remove_fifos(runtime.containerd)
    for shim in runtime.containerd.shim_pids():
        with suppress(ProcessLookupError):  # shims of removed tasks exit by themselves
            os.kill(shim, signal.SIGTERM)
    eventually(lambda: runtime.containerd.shim_pids() == [], "shims without tasks end")
    for line in runtime.containerd.ctr("snapshots", "ls").lines[1:]:
        if line.split()[0] in names:
            runtime.containerd.ctr("snapshots", "rm", line.split()[0], check=False)
