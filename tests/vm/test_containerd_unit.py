"""containerd's own unit restarted, killed and stopped under running containers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import RUNTIME
from tests.harness.runtime import Container, Runtime, is_alive
from tests.harness.waiting import eventually
from tests.vm.unit import UNIT, ContainerdUnit, systemctl

# Exits with 17 once the test creates a file in the container.
UNTIL_TOLD = ("sh", "-c", "until test -e /tmp/end; do sleep 0.1; done; exit 17")


@pytest.fixture
def runtime(containerd_unit: ContainerdUnit) -> Iterator[Runtime]:
    runtime = Runtime(containerd_unit, RUNTIME)
    yield runtime
    runtime.close()


def _tell(pid: int) -> None:
    with open(f"/proc/{pid}/root/tmp/end", "w"):
        pass


def _lives_on(container: Container, init: int, shims: list[int]) -> None:
    assert (container.pid, container.status) == (init, "RUNNING")
    assert container.runtime.containerd.shim_pids() == shims
    done = container.exec("sh", "-c", "echo out; echo err >&2; exit 5")
    assert (done.stdout, done.stderr, done.code) == ("out\n", "err\n", 5)


def _unit_of(pid: int) -> str:
    with open(f"/proc/{pid}/cgroup") as file:
        return file.read().strip().rpartition("/")[2]


def test_containers_live_on_whatever_becomes_of_containerds_unit(
    runtime: Runtime, containerd_unit: ContainerdUnit
) -> None:
    container = runtime.start(*UNTIL_TOLD)
    init, shims = container.pid, containerd_unit.shim_pids()
    # Where systemd would kill it with containerd, if the unit did not say KillMode=process.
    assert [_unit_of(shim) for shim in shims] == [UNIT]

    first = containerd_unit.pid
    systemctl("restart", UNIT)
    containerd_unit.wait_until_it_answers()
    second = containerd_unit.pid
    assert second != first
    _lives_on(container, init, shims)

    systemctl("kill", "--kill-who=main", "--signal=KILL", UNIT)
    eventually(lambda: containerd_unit.pid not in {0, second}, "systemd starts it again")
    containerd_unit.wait_until_it_answers()
    _lives_on(container, init, shims)

    systemctl("stop", UNIT)
    assert is_alive(init)
    _tell(init)
    eventually(lambda: not is_alive(init), "init has ended")
    systemctl("start", UNIT)
    containerd_unit.wait_until_it_answers()
    assert container.exit_code() == 17
    eventually(lambda: not any(map(is_alive, shims)), "its shim has ended")


def test_containers_that_end_while_containerd_is_killed_again_and_again_tell_their_codes(
    runtime: Runtime, containerd_unit: ContainerdUnit
) -> None:
    containers = [
        runtime.start("sh", "-c", f"until test -e /tmp/end; do sleep 0.1; done; exit {code}")
        for code in (3, 4)
    ]
    inits = [container.pid for container in containers]
    for init in inits:
        before = containerd_unit.pid
        _tell(init)
        systemctl("kill", "--kill-who=main", "--signal=KILL", UNIT)
        eventually(lambda old=before: containerd_unit.pid not in {0, old}, "it is started again")  # type: ignore[misc]
    containerd_unit.wait_until_it_answers()
    assert [container.exit_code() for container in containers] == [3, 4]
