"""After a reset, whatever its result, the agent monitors the other GPUs again; and meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING, Final

import pytest

from integration.nvml.lock import is_exclusive
from tests.e2e.test_drain_agent import GPU, Place, place_at
from tests.harness.gpu_agent import GpuAgent, gpu_agent
from tests.harness.kubelet_plugins import KubeletPlugins
from tests.harness.processes import with_nvml
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# An nvidia-smi that never exits; its child keeps the inherited lock when it is killed.
HANGS: Final = """#!/bin/sh
echo "$@" >> {state}/reset-calls
sleep 1000 &
echo $! > {state}/left-behind
wait
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with place_at(tmp_path) as place:
        yield place


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[KubeletPlugins]:
    with KubeletPlugins(str(tmp_path / "kubelet")) as kubelet:
        yield kubelet


@pytest.fixture
def agent(place: Place, kubelet: KubeletPlugins, tmp_path: Path) -> Iterator[GpuAgent]:
    words = ("--kubelet-socket", kubelet.socket, "--pod-resources", "")
    nobodys = ("--containerd-state", place.node.dev, "--cri-socket", "/nowhere")
    with gpu_agent(place.node, tmp_path, *words, *nobodys) as agent:
        assert kubelet.wait_for(GPU, 2) == set(place.uuids)
        eventually(lambda: with_nvml(agent.process.pid), "it watches")
        yield agent


def _watches_again(agent: GpuAgent, place: Place, kubelet: KubeletPlugins) -> None:
    """Check that the agent monitors the other GPU, and that the reset GPU is out of service."""
    eventually(lambda: agent.said("NVML is open again"), "NVML is queried again")
    eventually(lambda: with_nvml(agent.process.pid), "it watches again")
    assert kubelet.wait_for(GPU, 1) == {place.uuids[0]}
    assert place.mark(1) is not None
    eventually(lambda: agent.states() == ["healthy", "healthy"], "nobody is suspect")
    agent.xid(0, 79, "GPU has fallen off the bus.")
    kubelet.wait_for(GPU, 0)


def _begun(agent: GpuAgent, place: Place) -> subprocess.Popen[str]:
    """Begin a reset, and wait until nvidia-smi runs and the agent has closed NVML."""
    reset = place.spawn("reset", "1")
    eventually(place.called, "nvidia-smi runs")
    eventually(lambda: agent.said("NVML is closed"), "the agent has closed NVML")
    return reset


def test_a_reset_that_fails_lets_the_agent_watch_again(
    place: Place, agent: GpuAgent, kubelet: KubeletPlugins
) -> None:
    reset = _begun(agent, place)
    place.go_on(3, "In use by another client")
    reset.communicate(timeout=60)
    assert reset.returncode == 1
    _watches_again(agent, place, kubelet)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_reset_that_is_ended_lets_the_agent_watch_again(
    place: Place, agent: GpuAgent, kubelet: KubeletPlugins, number: signal.Signals
) -> None:
    reset = _begun(agent, place)
    reset.send_signal(number)
    reset.communicate(timeout=60)
    if number == signal.SIGKILL:
        # Its nvidia-smi keeps running, and NVML stays closed until it exits.
        assert not agent.said("NVML is open again")
        place.go_on()
    _watches_again(agent, place, kubelet)


def test_a_failure_of_another_gpu_counts_while_one_is_reset(
    place: Place, agent: GpuAgent, kubelet: KubeletPlugins
) -> None:
    reset = place.spawn("reset", "1")
    eventually(place.called, "nvidia-smi runs")
    assert not with_nvml(agent.process.pid)
    eventually(lambda: agent.states() == ["healthy", "suspect"], "the other one is watched enough")
    agent.xid(0, 79, "GPU has fallen off the bus.")
    kubelet.wait_for(GPU, 0)
    place.lets_reset(reset)
    assert kubelet.wait_for(GPU, 1) == {place.uuids[1]}


def test_a_reset_that_was_killed_as_it_had_nvml_closed_is_gone_on_with(
    place: Place, agent: GpuAgent, kubelet: KubeletPlugins
) -> None:
    reset = place.spawn("reset", "1")
    eventually(place.called, "nvidia-smi runs")
    reset.kill()
    reset.communicate(timeout=60)
    place.go_on()
    eventually(lambda: not is_exclusive(place.node.state), "its nvidia-smi has exited")
    place.lets_reset(place.spawn("reset", "1"), times=2)
    assert place.mark(1) is None
    assert kubelet.wait_for(GPU, 2) == set(place.uuids)
    eventually(lambda: with_nvml(agent.process.pid), "it watches again")


def test_a_reset_whose_nvidia_smi_cannot_be_ended_keeps_nvml_from_nobody(place: Place) -> None:
    """nvidia-smi is killed at its timeout; a child that inherited the lock survives."""
    program = f"{place.node.driver_root}/usr/bin/nvidia-smi"
    with open(program, "w", encoding="ascii") as file:
        file.write(HANGS.format(state=place.node.state))
    reset = place.spawn("reset", "1", patience="0.02")
    _, err = reset.communicate(timeout=120)
    assert reset.returncode == 1
    assert err.splitlines()[-1].startswith("NVSHIM-E2646 reset-failed")
    with open(f"{place.node.state}/left-behind", encoding="ascii") as file:
        left = int(file.read())
    try:
        assert not is_exclusive(place.node.state)
        rows = place.call("list", "-o", "json").items
        assert [bool(row["out_of_service"]) for row in rows] == [False, True]
    finally:
        os.kill(left, signal.SIGKILL)
