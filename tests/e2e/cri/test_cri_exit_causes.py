"""The kubelet can read why a pod's container exited."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from api.proto import cri_pb2 as pb
from integration.simulated import Scenario, SimulatedNode
from tests.harness.failing import FailingNode, MessageFile
from tests.harness.nvshim import nvshim
from tests.harness.pods import IDLE, Pod, PodContainer, Pods

DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
WISH: Final = "io.containerd.nvidia.v1.fault-exit-code"
KILLED: Final = 137


@pytest.fixture(scope="module")
def node_that_fails(workshop: str) -> Iterator[SimulatedNode]:
    with SimulatedNode.create(f"{workshop}/failing-pods", Scenario.load("two")) as node:
        yield node


@pytest.fixture
def failing(
    pods: Pods, node_that_fails: SimulatedNode, configure: Callable[..., None]
) -> FailingNode:
    if not pods.is_ours:
        pytest.skip("containerd's own shim knows nothing of GPUs")
    configure(node=node_that_fails)
    return FailingNode(node_that_fails, "k8s.io")


def start(pod: Pod, failing: FailingNode, message: MessageFile, name: str = "main") -> PodContainer:
    """Start a container with the first GPU and the kubelet's message file."""
    mount = pb.Mount(container_path="/dev/termination-log", host_path=message.path)
    granted = {DEVICES: failing.uuid()}
    return pod.start(*IDLE, name=name, granted=granted, mounts=[mount])


def kill(container: PodContainer) -> int:
    container.stop()  # without grace
    return container.exit_code()


def test_a_kubelet_tells_why_it_ended(pods: Pods, failing: FailingNode, tmp_path: Path) -> None:
    message = MessageFile(str(tmp_path / "kubelet"))
    pod = pods.run()
    container = start(pod, failing, message)
    with failing.agent():
        failing.tell(container.id, 79, 31)
        assert kill(container) == KILLED
    status = container.status
    assert (status.reason, status.exit_code) == ("Error", KILLED)
    [mount] = [each for each in status.mounts if each.container_path == "/dev/termination-log"]
    assert mount.host_path == message.path, "the kubelet reads this path"
    assert re.fullmatch(
        r"GPU failure: Xid 79 \(GPU has fallen off the bus\) on GPU-[0-9a-f]{4}… at [0-9:]{8}, "
        r"\d+\.\d s before exit, and 1 more\. Not the application's fault\. Node \S+ needs a "
        r"reboot\.\n",
        message.text,
    )
    assert container.output("stderr") == f"nvshim: {message.text}"


def test_a_pod_can_have_another_exit_code(pods: Pods, failing: FailingNode, tmp_path: Path) -> None:
    message = MessageFile(str(tmp_path / "kubelet"), "step 7\n")
    pod = pods.run(handler="handing on", annotations={WISH: "85"})
    container = start(pod, failing, message)
    failing.tell(container.id, 79)
    assert kill(container) == 85
    assert container.status.reason == "Error"
    [own, told] = message.text.splitlines()
    assert own == "step 7"
    assert told.endswith("The exit code was 137.")


def test_a_container_that_is_gone_is_explained(
    pods: Pods, failing: FailingNode, tmp_path: Path
) -> None:
    message = MessageFile(str(tmp_path / "kubelet"))
    pod = pods.run()
    container = start(pod, failing, message)
    failing.tell(container.id, 79)
    kill(container)
    name = f"tests/{pod.config.metadata.name}/main"
    assert not os.path.exists(container.bundle)
    where = ("--config", failing.node.config_path)
    told = nvshim("explain", name, *where)
    lines = told.stdout.splitlines()
    assert len(lines) <= 10
    words = " ".join(told.stdout.split())
    assert "exit code 137" in words
    assert "Xid 79 (GPU has fallen off the bus)" in words
    assert container.id[:12] in words
    document = nvshim("explain", container.id, "-o", "json", *where).document
    assert document["end"]["cause"] == message.text.strip()
    assert [fault["code"] for fault in document["end"]["faults"]] == [79]
    # The next attempt runs, and users query it by the same name.
    container.remove()
    again = pod.start(*IDLE, name="main", granted={DEVICES: failing.uuid()})
    state = f"{pods.containerd.directory}/state"
    told = nvshim("explain", name, "--containerd-state", state, *where)
    words = " ".join(told.stdout.split())
    assert again.id[:12] in words
    assert "Xid 79 (GPU has fallen off the bus)" in words


def test_a_container_that_has_its_gpu_by_another_is_told_too(
    pods: Pods, failing: FailingNode, tmp_path: Path
) -> None:
    """As with an engine that applies CDI: the spec has the node before the shim sees it."""
    message = MessageFile(str(tmp_path / "kubelet"))
    mount = pb.Mount(container_path="/dev/termination-log", host_path=message.path)
    given = pb.Device(
        container_path="/dev/nvidia0", host_path=f"{failing.node.dev}/nvidia0", permissions="rwm"
    )
    pod = pods.run(handler="handing on", annotations={WISH: "85"})
    container = pod.start(*IDLE, mounts=[mount], devices=[given])
    assert not os.path.exists(f"{container.bundle}/nvidia.json")
    failing.tell(container.id, 79)
    assert kill(container) == 85
    assert message.text.startswith("GPU failure: Xid 79 ")
    assert container.output("stderr") == f"nvshim: {message.text}"
