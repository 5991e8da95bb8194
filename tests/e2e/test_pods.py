"""Containers of one pod share one shim."""

from __future__ import annotations

import pytest

from tests.harness.runtime import Container, Runtime, new_name

GROUP = "io.containerd.runc.v2.group"
SANDBOX = "io.kubernetes.cri.sandbox-id"


def _start(runtime: Runtime, pod: str, annotation: str = GROUP) -> Container:
    return runtime.start_idle(flags=["--annotation", f"{annotation}={pod}"])


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("annotation", [GROUP, SANDBOX])
def test_one_shim_serves_the_containers_of_a_pod(runtime: Runtime, annotation: str) -> None:
    pod = new_name("pod")
    containers = [_start(runtime, pod, annotation) for _ in range(2)]
    (shim,) = runtime.containerd.shim_pids()
    assert [_parent(container.pid) for container in containers] == [shim, shim]


def test_containers_without_a_pod_have_a_shim_each(runtime: Runtime) -> None:
    containers = [runtime.start_idle() for _ in range(2)]
    shims = runtime.containerd.shim_pids()
    assert sorted(_parent(container.pid) for container in containers) == shims
    assert len(shims) == 2


def test_pod_can_be_made_again_under_its_name(runtime: Runtime) -> None:
    pod = new_name("pod")
    for _ in range(2):
        container = _start(runtime, pod)
        assert container.exec("echo", "here").stdout == "here\n"
        container.remove()


def test_pod_survives_a_restart_of_containerd(runtime: Runtime) -> None:
    pod = new_name("pod")
    containers = [_start(runtime, pod) for _ in range(2)]
    (shim,) = runtime.containerd.shim_pids()
    runtime.containerd.restart()
    assert [container.status for container in containers] == ["RUNNING", "RUNNING"]
    containers.append(_start(runtime, pod))
    assert runtime.containerd.shim_pids() == [shim]
    for container in containers:
        assert container.exec("echo", "here").stdout == "here\n"
