"""Pods without our RuntimeClass get their GPUs by NRI, from the agent and a real containerd."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from integration.cri.errors import CriRefused
from integration.simulated import Scenario, SimulatedNode
from tests.harness.kubelet_plugins import KubeletPlugins
from tests.harness.node_agent import NodeAgent
from tests.harness.nvshim import nvshim
from tests.harness.pods import IDLE, Pod, PodContainer, Pods, pods_of
from tests.harness.releases import UNSTABLE, of_releases
from tests.harness.runtime import OURS, STOCK
from tests.harness.waiting import eventually
from tools.cri.plugin import CriPlugin, nri_socket
from tools.images import GLIBC, PAUSE, glibc, pause
from tools.parts import Parts

GPU: Final = "nvidia.com/gpu"
DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
HANDLERS: Final[dict[str, dict[str, Any]]] = {
    "runc": {"runtime_type": STOCK},
    "nvidia": {"runtime_type": OURS},
}
REGISTERED: Final = "registered by NRI"
LISTED: Final = re.compile(r"\(UUID: (GPU-[0-9a-f-]+)\)")


class World:
    """A node, its kubelet, its containerd with NRI, and an agent that is not started yet."""

    def __init__(
        self, pods: Pods, kubelet: KubeletPlugins, agent: NodeAgent, where: tuple[str, ...]
    ) -> None:
        self.pods, self.kubelet, self.agent, self.where = pods, kubelet, agent, where

    def allocate(self, pod: Pod, name: str) -> tuple[dict[str, Any], str]:
        """Allocate a GPU to a container; return the options to start it with, and the GPU."""
        answer = self.kubelet.allocate(GPU, 1, pod=pod.config.metadata.name, container=name)
        started = {"image": GLIBC, "granted": answer, "name": name}
        return started, self.kubelet.assignments[-1].ids[0]

    def registers(self, times: int = 1) -> None:
        """Wait until the agent has registered ``times`` times."""
        eventually(lambda: len(self.agent.said(REGISTERED)) == times, "it is registered")

    def kept(self) -> list[str]:
        try:
            return os.listdir(f"{self.agent.node.state}/nri")
        except FileNotFoundError:
            return []


@contextmanager
def world(
    release: str, directory: Path, shim_directory: str, *, default: str = "runc"
) -> Iterator[World]:
    plugin = CriPlugin(HANDLERS, PAUSE, default, nri=True)
    resources = str(directory / "pod-resources.sock")
    with (
        SimulatedNode.create(str(directory / "node"), Scenario.load("two")) as node,
        KubeletPlugins(str(directory / "kubelet"), pod_resources=resources) as kubelet,
        pods_of(
            plugin, glibc(), pause(), shim_directory=shim_directory, shim_config=node.config_path,
            parts=Parts.named(release),
        ) as pods,
    ):  # fmt: skip
        assert pods.kubelet  # the agent reads the kubelet's path when it starts
        state = pods.containerd.bundle("x").rpartition("/io.containerd.")[0]
        agent = NodeAgent(
            node, str(directory), kubelet.socket, "--nri",
            "--nri-socket", nri_socket(pods.containerd.directory), "--containerd-state", state,
            "--pod-resources", resources,
        )  # fmt: skip
        agent.configure(flags={"plugin": {"deviceListStrategy": ["envvar"]}})
        yield World(pods, kubelet, agent, ("--containerd-state", state))


def gpus_of(container: PodContainer) -> list[str]:
    return container.exec("sh", "-c", "ls -d /dev/nvidia[0-9] 2>/dev/null; true").lines


@pytest.mark.parametrize("release", of_releases("trixie", UNSTABLE))
def test_a_pod_of_plain_runc_has_what_the_kubelet_gave_it_and_no_other_has_anything(
    release: str, tmp_path: Path, shim_directory: str
) -> None:
    with world(release, tmp_path, shim_directory) as on, on.agent:
        on.registers()
        on.kubelet.wait_for(GPU, 2)
        pod = on.pods.run(handler="runc")
        fields, uuid = on.allocate(pod, "main")
        container = pod.start(*IDLE, **fields)
        done = container.exec("nvidia-smi", "-L")
        assert LISTED.findall(done.stdout) == [uuid], done.stdout + done.stderr
        assert len(gpus_of(container)) == 1
        # Other pods know that GPU's UUID, and pretend to be that pod.
        of_victim = {"io.kubernetes.cri.sandbox-uid": pod.config.metadata.uid}
        cdi = {"cdi.k8s.io/x": f"nvidia.com/gpu={uuid}"}
        hostile = on.pods.run(handler="runc", annotations=of_victim | cdi)
        for other, value in ((pod, uuid), (hostile, uuid), (hostile, "all")):
            mine = other.start(*IDLE, image=GLIBC, env={DEVICES: value}, annotations=of_victim)
            assert gpus_of(mine) == []
        where = ("--config", on.agent.node.config_path, *on.where)
        explained = nvshim("explain", container.id, "-v", *where).stdout
        assert uuid in explained
        assert "kubelet_internal_checkpoint" in explained
        assert on.kept() == [container.id]
        container.stop()
        container.remove()
        eventually(lambda: on.kept() == [], "its files were removed with it")


@pytest.mark.thorough
@pytest.mark.parametrize("release", of_releases("trixie", UNSTABLE))
def test_it_comes_again_after_the_engine_refuses_and_finds_what_started_without_it(
    release: str, tmp_path: Path, shim_directory: str
) -> None:
    with world(release, tmp_path, shim_directory) as on:
        agent = on.agent
        with agent:
            on.registers()
            on.kubelet.wait_for(GPU, 2)
            pod = on.pods.run(handler="runc")
            fields, _ = on.allocate(pod, "main")
            container = pod.start(*IDLE, **fields)
            on.pods.containerd.restart()
            on.registers(2)
            assert on.kept() == [container.id]
            assert len(gpus_of(container)) == 1
            # An error makes the engine refuse the container.
            fields, other = on.allocate(pod, "silent")
            nvshim("drain", "--config", agent.node.config_path, other, check=False)
            with pytest.raises(CriRefused, match="NVSHIM-E0231"):
                pod.start(*IDLE, **fields)
            assert on.kept() == [container.id]
            nvshim("undrain", "--config", agent.node.config_path, other)
            # Without an answer, the container starts without its GPU after two seconds.
            os.kill(agent.pid, signal.SIGSTOP)
            try:
                silent = pod.start(*IDLE, **fields)
            finally:
                os.kill(agent.pid, signal.SIGCONT)
            assert gpus_of(silent) == []
            on.registers(3)
            title = f"tests/{pod.config.metadata.name}/silent"
            (line,) = eventually(lambda: agent.said("runs without a device"), "the report")
            assert (line["container"], line["device"]) == (title, other)
        silent.remove()
        assert gpus_of(pod.start(*IDLE, **fields)) == []  # no plugin is registered


@pytest.mark.thorough
@pytest.mark.parametrize("release", of_releases("trixie", UNSTABLE))
def test_a_container_gets_its_gpus_from_the_shim_or_by_nri_and_not_twice(
    release: str, tmp_path: Path, shim_directory: str
) -> None:
    with world(release, tmp_path, shim_directory, default="nvidia") as on, on.agent:
        on.registers()
        on.kubelet.wait_for(GPU, 2)
        # A pod names the shim, or gets it as the default.
        for handler, by_nri in (("nvidia", False), ("", True)):
            on.pods.handler = handler
            pod = on.pods.run()
            fields, uuid = on.allocate(pod, "main")
            container = pod.start(*IDLE, **fields)
            assert LISTED.findall(container.exec("nvidia-smi", "-L").stdout) == [uuid]
            assert on.kept() == [container.id] * by_nri
            assert os.path.exists(f"{container.bundle}/nvidia.json") != by_nri
            found = container.exec("sh", "-c", "ls /usr/lib*/*/libcuda.so.1 /usr/lib*/libcuda.so.1")
            assert bool(found.lines) != by_nri
            variable = container.exec("sh", "-c", f"echo ${DEVICES}").lines
            assert variable == ["void" if by_nri else uuid]
