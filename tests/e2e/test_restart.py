"""containerd stops and restarts; containers are not affected."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress

import pytest

from tests.harness.runtime import Container, Runtime, is_alive, remove_fifos
from tests.harness.waiting import eventually

# Exits with 17 when the test creates a file in the container.
UNTIL_TOLD = ("sh", "-c", "until test -e /tmp/end; do sleep 0.02; done; exit 17")


def _tell(container_pid: int) -> None:
    with open(f"/proc/{container_pid}/root/tmp/end", "w"):
        pass


def test_container_runs_on_while_containerd_restarts(runtime: Runtime) -> None:
    container = runtime.start(*UNTIL_TOLD)
    init = container.pid
    shims = runtime.containerd.shim_pids()
    for end in (runtime.containerd.stop, runtime.containerd.kill):
        end()
        assert is_alive(init)
        runtime.containerd.start()
        assert (container.pid, container.status) == (init, "RUNNING")
        assert runtime.containerd.shim_pids() == shims
        done = container.exec("sh", "-c", "echo out; echo err >&2; exit 5")
        assert (done.stdout, done.stderr, done.code) == ("out\n", "err\n", 5)
    _tell(init)
    assert container.exit_code() == 17


def test_container_that_was_only_created_survives_a_restart(runtime: Runtime) -> None:
    container = runtime.start(*UNTIL_TOLD)
    runtime.containerd.ctr("tasks", "pause", container.name)
    runtime.containerd.restart()
    assert container.status == "PAUSED"
    runtime.containerd.ctr("tasks", "resume", container.name)
    _tell(container.pid)
    assert container.exit_code() == 17


def test_stopped_task_is_still_known_after_a_restart(runtime: Runtime) -> None:
    container = runtime.start("sh", "-c", "exit 9")
    container.wait_for("STOPPED")
    runtime.containerd.restart()
    assert container.status == "STOPPED"
    assert container.delete_task() == 9


def _stays_running(container: Container) -> None:
    """Check that a container keeps writing lines."""
    for _ in range(5):
        assert container.exec("sleep", "0.05").code == 0
    assert container.status == "RUNNING"


def _published_exits(runtime: Runtime) -> int:
    """Return how many exits containerd has logged; the log does not name the container."""
    ours = f"ns={runtime.containerd.namespace} topic=/tasks/exit"
    return len(re.findall(re.escape(f'msg="event forwarded" {ours}'), runtime.containerd.log()))


def test_task_that_ends_while_containerd_is_away_stays_until_it_is_deleted(
    runtime: Runtime,
) -> None:
    # containerd 1.7 and later queries a shim for its processes when it restarts, and deletes one
    # that has none.
    container = runtime.start(*UNTIL_TOLD)
    init = container.pid
    runtime.containerd.kill()
    _tell(init)
    eventually(lambda: not is_alive(init), "init has exited")
    runtime.containerd.start()
    container.wait_for("STOPPED")
    if runtime.is_ours:
        assert container.pids == [init]
    runtime.containerd.restart()
    container.wait_for("STOPPED")
    assert container.delete_task() == 17


def test_every_exit_arrives_once_whenever_containerd_was_killed(runtime: Runtime) -> None:
    containers = [runtime.start(*UNTIL_TOLD) for _ in range(3)]
    none = _published_exits(runtime)
    exited = runtime.start("sh", "-c", "exit 17")
    before = eventually(lambda: max(0, _published_exits(runtime) - none), "it is published") + none
    inits = [container.pid for container in containers]
    _tell(inits[0])  # while containerd dies, while it is down, when it is back
    runtime.containerd.kill()
    _tell(inits[1])
    eventually(lambda: not any(map(is_alive, inits[:2])), "two have exited")
    runtime.containerd.start()
    _tell(inits[2])
    for container in containers:
        container.wait_for("STOPPED")
    eventually(lambda: _published_exits(runtime) >= before + 2, "the exits are published")
    assert [container.exit_code() for container in (*containers, exited)] == [17] * 4
    # The first exit may have arrived before the kill; no exit arrived twice.
    assert _published_exits(runtime) in (before + 2, before + 3)


def test_container_whose_start_containerd_does_not_survive_runs_or_leaves_nothing(
    runtime: Runtime,
) -> None:
    if not runtime.is_ours:
        pytest.skip("containerd's own shim leaves what was half made")
    containers = [runtime.expect() for _ in range(4)]
    clients = [
        runtime.containerd.spawn_ctr(
            *runtime.words("sleep", "1000", name=container.name, flags=["--detach"]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for container in containers
    ]
    eventually(lambda: containers[0].pid, "the first one is there")
    runtime.containerd.kill()
    for client in clients:
        client.wait()
    runtime.containerd.start()
    for container in containers:
        assert container.status in {"", "UNKNOWN", "CREATED", "RUNNING"}
        container.remove()
        # A client that failed may have left the snapshot, which it creates first.
        runtime.containerd.ctr("snapshots", "rm", container.name, check=False)
    for shim in runtime.containerd.shim_pids():
        # A shim that containerd started and did not use. It would exit after a minute.
        with suppress(ProcessLookupError):  # it may have exited already
            os.kill(shim, signal.SIGTERM)
    remove_fifos(runtime.containerd)
