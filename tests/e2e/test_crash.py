"""After the shim is killed, containerd calls ``delete``, and nothing of the container is left."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from integration.containers import traces
from tests.harness.events import Recorder
from tests.harness.runtime import Container, Runtime, is_alive, new_name, remove_fifos
from tests.harness.waiting import eventually
from tools.containerd import PrivateContainerd

GROUP = "io.containerd.runc.v2.group"


@pytest.fixture(autouse=True)
def _what_others_leave(containerd: PrivateContainerd, runtime: Runtime) -> Iterator[None]:
    """Remove leftovers that the killed shim is not responsible for."""
    yield
    runtime.close()
    remove_fifos(containerd)
    if not runtime.is_ours:
        # containerd's own shim does not remove the socket of a killed one.
        for trace in traces.sockets(containerd.marks):
            os.unlink(trace.name)


def _kill_shim(runtime: Runtime) -> None:
    (shim,) = runtime.containerd.shim_pids()
    os.kill(shim, signal.SIGKILL)


def _wait_until_cleaned(container: Container, init: int) -> None:
    eventually(lambda: not is_alive(init), "init is dead")
    eventually(lambda: container.status in {"", "STOPPED"}, "containerd knows")
    eventually(
        lambda: not os.path.exists(container.runtime.containerd.bundle(container.name)),
        "the bundle is gone",
    )
    # Before that, containerd would confuse a new task with the one that it is removing.
    eventually(lambda: container.status == "", "containerd no longer lists the task")


def _is_started_again(container: Container) -> bool:
    """Try to start it; containerd removes a task of a dead shim only a moment later."""
    containerd = container.runtime.containerd
    done = containerd.ctr(
        "tasks", "start", "--detach", "--fifo-dir", containerd.fifo_directory, container.name,
        check=False,
    )  # fmt: skip
    assert done.code == 0 or "already exists" in done.stderr, done.stderr
    return done.code == 0


def test_killed_shim_leaves_nothing_of_its_container(runtime: Runtime) -> None:
    container = runtime.start("sh", "-c", "sleep 1000 & sleep 1000")
    init = container.pid
    _kill_shim(runtime)
    _wait_until_cleaned(container, init)


def test_exit_and_delete_are_published_for_a_killed_shim(runtime: Runtime) -> None:
    with Recorder(runtime.containerd) as recorder:
        container = runtime.start_idle()
        # A shim sends events after its answer: if it is killed first, there is no start event.
        recorder.wait_for(container.name, lambda names: "start" in names)
        _kill_shim(runtime)
        names = recorder.wait_for(container.name, lambda names: "delete" in names)
        assert names == ["create", "start", "exit", "delete"]
        assert recorder.of(container.name)[2].fields["exit_status"] == 128 + 9


def test_task_can_be_started_again_after_the_shim_was_killed(runtime: Runtime) -> None:
    container = runtime.start_idle()
    init = container.pid
    _kill_shim(runtime)
    _wait_until_cleaned(container, init)
    eventually(lambda: _is_started_again(container), "the task starts again")
    assert container.status == "RUNNING"
    assert container.pid != init


def test_attached_client_is_told_when_the_shim_was_killed(runtime: Runtime) -> None:
    _, ctr = runtime.spawn("sh", "-c", "echo ready; sleep 1000", stdout=subprocess.PIPE)
    assert ctr.stdout is not None
    with ctr.stdout:
        assert ctr.stdout.readline() == b"ready\n"
        _kill_shim(runtime)
        assert ctr.wait(60) != 0


def test_killed_shim_leaves_nothing_of_an_exec(runtime: Runtime) -> None:
    container = runtime.start_idle()
    init = container.pid
    ctr = runtime.containerd.spawn_ctr(
        *container.exec_words("sh", "-c", "echo ready; exec sleep 1000"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert ctr.stdout is not None
    with ctr.stdout:
        assert ctr.stdout.readline() == b"ready\n"
        _kill_shim(runtime)
        assert ctr.wait(60) != 0
    _wait_until_cleaned(container, init)


def test_killed_shim_of_a_pod_leaves_nothing_of_any_container(runtime: Runtime) -> None:
    pod = new_name("pod")
    containers = [runtime.start_idle(flags=["--annotation", f"{GROUP}={pod}"]) for _ in range(3)]
    inits = [container.pid for container in containers]
    _kill_shim(runtime)
    for container, init in zip(containers, inits, strict=True):
        _wait_until_cleaned(container, init)


def test_shim_killed_while_containerd_is_away_is_cleaned_up_when_it_is_back(
    runtime: Runtime,
) -> None:
    container = runtime.start_idle()
    init = container.pid
    runtime.containerd.kill()
    (shim,) = runtime.containerd.shim_pids()
    os.kill(shim, signal.SIGKILL)
    runtime.containerd.start()
    _wait_until_cleaned(container, init)
