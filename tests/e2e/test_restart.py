"""containerd goes away and comes back; containers do not notice."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.harness.runtime import is_alive, remove_fifos
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from tests.harness.runtime import Container, Runtime

# Ends with 17 when it is told to, by a file that is made from outside.
UNTIL_TOLD = ("sh", "-c", "until test -e /tmp/end; do sleep 0.02; done; exit 17")


def _tell(container_pid: int) -> None:
    with open(f"/proc/{container_pid}/root/tmp/end", "w"):
        pass


@pytest.mark.parametrize("way", ["stop", "kill"])
def test_container_runs_on_while_containerd_restarts(runtime: Runtime, way: str) -> None:
    container = runtime.start(*UNTIL_TOLD)
    init = container.pid
    shims = runtime.containerd.shim_pids()
    getattr(runtime.containerd, way)()
    assert is_alive(init)
    runtime.containerd.start()
    assert (container.pid, container.status) == (init, "RUNNING")
    assert runtime.containerd.shim_pids() == shims
    done = container.exec("sh", "-c", "echo out; echo err >&2; exit 5")
    assert (done.stdout, done.stderr, done.code) == ("out\n", "err\n", 5)
    _tell(init)
    assert container.exit_code() == 17


def test_exit_while_containerd_is_away_is_known_afterwards(runtime: Runtime) -> None:
    container = runtime.start(*UNTIL_TOLD)
    init = container.pid
    runtime.containerd.kill()
    _tell(init)
    eventually(lambda: not is_alive(init), "init has ended")
    runtime.containerd.start()
    assert container.exit_code() == 17


def test_exit_while_containerd_is_away_is_published_afterwards(runtime: Runtime) -> None:
    container = runtime.start(*UNTIL_TOLD)
    init = container.pid
    runtime.containerd.kill()
    _tell(init)
    eventually(lambda: not is_alive(init), "init has ended")
    before = _published_exits(runtime)
    runtime.containerd.start()
    eventually(lambda: _published_exits(runtime) > before, "the exit is published")
    assert container.exit_code() == 17
    # No second one: consumers count them.
    assert _published_exits(runtime) == before + 1


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


def test_attached_client_may_die_and_the_container_goes_on_writing(runtime: Runtime) -> None:
    container, ctr = runtime.spawn(
        "sh", "-c", "while echo line; do sleep 0.02; done; exit 3", stdout=subprocess.PIPE
    )
    assert ctr.stdout is not None
    with ctr.stdout:
        assert ctr.stdout.readline() == b"line\n"
        ctr.kill()
        ctr.wait()
    _stays_running(container)
    runtime.containerd.restart()
    _stays_running(container)
    container.remove()
    remove_fifos(runtime.containerd)


def _stays_running(container: Container) -> None:
    """As long as it takes to write some lines."""
    for _ in range(5):
        assert container.exec("sleep", "0.05").code == 0
    assert container.status == "RUNNING"


def _published_exits(runtime: Runtime) -> int:
    """How many exits containerd has been told of; it logs each, though not whose it is."""
    ours = f"ns={runtime.containerd.namespace} topic=/tasks/exit"
    return len(re.findall(re.escape(f'msg="event forwarded" {ours}'), runtime.containerd.log()))
