"""Pods survive a restart of containerd, which then learns what happened meanwhile."""

from __future__ import annotations

import os
import signal

import pytest

from api.proto import cri_pb2 as pb
from integration.cri.errors import CriError
from tests.harness.pods import IDLE, Pods
from tests.harness.runtime import is_alive
from tests.harness.waiting import eventually

UNTIL_TOLD = ("sh", "-c", "trap 'exit 17' USR1; echo up; while :; do sleep 0.05; done")


def test_pod_goes_on_while_containerd_is_killed(pods: Pods) -> None:
    pod = pods.run()
    idle, ending = pod.start(*IDLE, env={"WORD": "kept"}), pod.start(*UNTIL_TOLD)
    eventually(lambda: ending.output() == "up\n", "the container has set its trap")
    shims, pid, dying = pod.shims, idle.pid, ending.pid
    pods.containerd.kill()
    os.kill(dying, signal.SIGUSR1)
    eventually(lambda: not is_alive(dying), "it has exited")
    _start_again(pods)
    assert pod.is_ready
    assert pod.shims == shims
    assert (idle.state, idle.pid) == ("RUNNING", pid)
    assert idle.exec("sh", "-c", "echo $WORD").stdout == "kept\n"
    assert ending.exit_code() == 17
    # The pods still work.
    ending.remove()
    assert pod.run("sh", "-c", "exit 3").status.exit_code == 3
    idle.stop()
    assert idle.exit_code() == 137
    pod.remove()
    eventually(lambda: not is_alive(shims[0]), "the shim has exited")


def test_log_goes_on_after_a_restart(pods: Pods) -> None:
    pod = pods.run()
    container = pod.start("sh", "-c", "while :; do echo line; sleep 0.05; done")
    eventually(lambda: container.output().count("line\n") > 2, "its first lines")
    pods.containerd.restart()
    _start_again(pods)
    before = container.output().count("line\n")
    eventually(lambda: container.output().count("line\n") > before + 2, "more lines")
    assert container.state == "RUNNING"


def test_pods_and_containers_whose_shim_was_killed_are_not_ready(pods: Pods) -> None:
    if not pods.is_ours:
        pytest.skip("containerd's own shim leaves its socket behind")
    pod = pods.run()
    container = pod.start(*IDLE)
    (shim,) = pod.shims
    pid = container.pid
    os.kill(shim, signal.SIGKILL)
    assert container.exit_code() in {137, 255}
    eventually(lambda: not pod.is_ready, "the pod is not ready")
    eventually(lambda: not is_alive(pid), "the container is gone")
    pod.remove()
    assert pods.ids() == []


def _start_again(pods: Pods) -> None:
    """Start containerd if it does not run, and wait until it serves pods."""
    if not pods.containerd.pid:
        pods.containerd.start()
    eventually(lambda: _serves(pods), "the CRI answers")


def _serves(pods: Pods) -> bool:
    try:
        return bool(pods.cri.version(pb.VersionRequest()).runtime_name)
    except CriError:  # it is still recovering its state
        return False
