"""The node agent as its DaemonSet runs it: the rendered manifest, its image, a real containerd.

The kubelet's part has two halves: one creates pods from manifests (:mod:`tests.harness.kubelet`),
the other accepts device plugins and calls them (:mod:`tests.harness.kubelet_plugins`).
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

import pytest
import yaml

from api.proto import cri_pb2 as pb
from api.proto import deviceplugin_pb2
from integration.kubernetes.gpu_detection import has_gpu
from integration.kubernetes.host import Host
from integration.node.refresh import MARK, MARK_OF_UNIT
from integration.simulated import SimulatedNode
from integration.tree import Tree
from tests.harness.kubectl import Kubectl, render
from tests.harness.kubelet import Container, Kubelet
from tests.harness.kubelet_plugins import KubeletPlugins
from tests.harness.waiting import eventually
from tools.images import GLIBC
from tools.node_image import IMAGE

RESOURCE: Final = "nvidia.com/gpu"
SPEC: Final = "/run/cdi/nvidia.yaml"
_PREFIX: Final = "/opt/containerd-shim-nvidia"
# Debian 12's containerd does not read the CRI's CDI names, which the agent uses unless the
# configuration says otherwise. This one does not.
_PLAIN: Final = "version: v1\n"
_SHARED: Final = (
    f"{_PLAIN}sharing: {{timeSlicing: {{resources: [{{name: {RESOURCE}, replicas: 3}}]}}}}\n"
)


def _prepare(kubelet: Kubelet, tree: Tree) -> None:
    """Prepare a node as the installer does: an installed tree, and a handler."""
    world = kubelet.world
    world.do(
        f"mkdir -p {_PREFIX} && ln -s {tree.path} {_PREFIX}/current\n"
        f"ln -s {_PREFIX}/current/bin/* /usr/local/bin/\n"
        "nvshim devices create\n"
        "nvshim configure containerd\n"
        "systemctl restart containerd"
    )
    kubelet.reconnect()
    # A spec from before the agent existed.
    world.do(f"mkdir -p /run/cdi && printf '{MARK_OF_UNIT.decode().strip()}\\n' >{SPEC}")


def _status(kubelet: Kubelet) -> dict[str, Any]:
    try:
        status: dict[str, Any] = json.loads(
            kubelet.read("/run/containerd-shim-nvidia/node.json") or "{}"
        )
    except FileNotFoundError:
        return {}
    return status


def _gpu_pod(kubelet: Kubelet, given: deviceplugin_pb2.ContainerAllocateResponse) -> Container:
    """Start a pod that has requested GPUs, with the plugin's answer."""
    pod = kubelet.run_pod("cuda", handler="nvidia")
    config = pb.ContainerConfig(
        metadata=pb.ContainerMetadata(name="cuda"),
        image=pb.ImageSpec(image=GLIBC),
        command=["sh", "-c", "ls /dev; probe dlopen libcuda.so.1 libnvidia-ml.so.1"],
        envs=[pb.KeyValue(key=key, value=value.encode()) for key, value in given.envs.items()],
        annotations=given.annotations,
    )
    kubelet.record(pod, "cuda", given)
    return kubelet.start(pod, config, {})


def _machine_has_gpu() -> bool:
    with Host("/") as host:
        return has_gpu(host)


@pytest.mark.skipif(_machine_has_gpu(), reason="this machine has a GPU")
def test_on_a_node_without_a_gpu_both_daemon_sets_are_ready_and_do_nothing(
    kubelet: Kubelet,
) -> None:
    """The simulated GPUs are on no bus, and the manifests do not ask for every node."""
    rendered = render(Kubectl.of_release("trixie"), "not-default")
    started = []
    for manifest in (each for each in rendered if each["kind"] == "DaemonSet"):
        _, container = kubelet.run_daemon_set(manifest, image=IMAGE)
        started.append((manifest, container))
    names = {manifest["metadata"]["name"] for manifest, _ in started}
    assert names == {"installer", "node-agent"}
    for manifest, container in started:
        for kind in ("startup", "readiness", "liveness"):
            eventually(lambda: container.probe(kind).code == 0, f"{kind} of {manifest}")  # noqa: B023 - at once
    status = json.loads(kubelet.read("/run/containerd-shim-nvidia/node-installer.json"))
    assert status["state"] == "no-gpu"
    for manifest, container in started:
        container.stop(manifest["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])
        assert container.exit_code() == 0, container.log()
    for directory in (_PREFIX, "/etc/containerd-shim-nvidia"):
        assert kubelet.world.do(f"ls -A {directory}").split() in ([], ["config.toml"])
    assert "nvidia" not in kubelet.read("/etc/containerd/config.toml")


def test_a_pod_gets_its_gpu_from_the_agent_of_the_daemon_set(
    kubelet: Kubelet, gpus: SimulatedNode, built_tree: Tree
) -> None:
    world = kubelet.world
    _prepare(kubelet, built_tree)
    rendered = render(Kubectl.of_release("trixie"), "not-default", "device-plugin-config", "mps")
    sets = [each for each in rendered if each["kind"] == "DaemonSet"]
    (manifest,) = (each for each in sets if each["metadata"]["name"] == "node-agent")
    (config_map,) = (each for each in rendered if each["kind"] == "ConfigMap")
    assert yaml.safe_load(config_map["data"]["config.yaml"])["version"] == "v1"
    kubelet.config_maps["device-plugin"] = {"config.yaml": _PLAIN}
    directory = world.path("/var/lib/kubelet/device-plugins")
    resources = world.path("/var/lib/kubelet/pod-resources/kubelet.sock")

    with KubeletPlugins(directory, pod_resources=resources) as plugins:
        _, agent = kubelet.run_daemon_set(manifest, image=IMAGE)
        try:
            uuids = plugins.wait_for(RESOURCE, 2)
            assert uuids == {gpu.uuid for gpu in gpus.scenario.gpus}
            eventually(lambda: agent.probe("readiness").code == 0, "ready")
            assert _status(kubelet)["resources"] == {RESOURCE: {"devices": 2, "healthy": 2}}
            assert kubelet.read(SPEC).startswith(MARK.decode())  # the agent has taken over the spec
            # It runs in the node's pid namespace, as its manifest configures.
            assert world.do(f"cat /proc/{_status(kubelet)['pid']}/cmdline").count("node") >= 1

            # Its token is visible in the root that it entered, and not on the node.
            token = "run/containerd-shim-nvidia/service-account/token"
            seen_there = world.do(f"cat /proc/{_status(kubelet)['pid']}/root/{token}")
            assert seen_there.startswith("token of node-agent")
            assert not os.path.exists(world.path(f"/{token}"))

            given = plugins.allocate(RESOURCE, 1, pod="cuda")
            cuda = _gpu_pod(kubelet, given)
            assert cuda.exit_code() == 0, cuda.log()
            (had,) = plugins.given(RESOURCE)
            numbers = {gpu.uuid: gpu.index for gpu in gpus.scenario.gpus}
            seen = {
                name for name in cuda.log().split() if name[:6] == "nvidia" and name[6:].isdigit()
            }
            assert seen == {f"nvidia{numbers[had]}"}

            # The agent applies a changed ConfigMap, and keeps earlier allocations.
            kubelet.change_config_map("device-plugin", {"config.yaml": _SHARED})
            shares = plugins.wait_for(RESOURCE, 6)
            assert {share.partition("::")[0] for share in shares} == uuids

            agent.stop(manifest["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])
            assert agent.exit_code() == 0, agent.log()
            left = [name for name in os.listdir(directory) if name.endswith(".sock")]
            assert left == ["kubelet.sock"]
        except BaseException:
            print(agent.log())  # noqa: T201 - shown if the test fails
            raise
