"""The Jobs that verify a cluster, run as a kubelet would run their pods."""

from __future__ import annotations

import os
import re
from typing import Any, Final

import yaml

from api.proto import cri_pb2 as pb
from api.proto.deviceplugin_pb2 import ContainerAllocateResponse
from integration.simulated import SimulatedNode
from integration.tree import Tree
from tests.harness.kubectl import MANIFESTS, Kubectl
from tests.harness.kubelet import Kubelet
from tests.harness.kubelet_plugins import KubeletPlugins
from tools.node_image import IMAGE

_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
_PREFIX: Final = "/opt/containerd-shim-nvidia"
_OUTCOME: Final = re.compile(r"^(passed|failed|skipped) +(\S+)", re.MULTILINE)


def _jobs() -> dict[str, dict[str, Any]]:
    text = Kubectl.of_release("trixie")("kustomize", os.path.join(MANIFESTS, "verify"))
    return {job["metadata"]["name"]: job for job in yaml.safe_load_all(text)}


def _prepare(kubelet: Kubelet, tree: Tree) -> None:
    kubelet.world.do(
        f"mkdir -p {_PREFIX} && ln -s {tree.path} {_PREFIX}/current\n"
        f"ln -s {_PREFIX}/current/bin/* /usr/local/bin/\n"
        "nvshim devices create"
    )


def _configure(kubelet: Kubelet) -> None:
    kubelet.world.do("nvshim configure containerd && systemctl restart containerd")
    kubelet.reconnect()


def test_the_job_tells_what_it_has_found_and_leaves_nothing(
    kubelet: Kubelet, gpus: SimulatedNode, built_tree: Tree
) -> None:
    world = kubelet.world
    job = _jobs()["verify"]
    _prepare(kubelet, built_tree)
    # The handler is not configured yet.
    _, pod = kubelet.run_daemon_set(job, image=IMAGE)
    assert pod.exit_code() == 1, pod.log()
    assert "failed  handler" in pod.log()
    _configure(kubelet)
    directory = world.path("/var/lib/kubelet/device-plugins")
    resources = world.path("/var/lib/kubelet/pod-resources/kubelet.sock")
    with KubeletPlugins(directory, pod_resources=resources):
        _, pod = kubelet.run_daemon_set(job, image=IMAGE)
        assert pod.exit_code() == 1, pod.log()
    told = {found[2]: found[1] for found in _OUTCOME.finditer(pod.log())}
    # The kubelet runs, and no plugin has registered with it.
    assert told.pop("plugin") == "failed"
    assert [name for name, outcome in told.items() if outcome == "passed"] == [
        "handler", "exit", "exec", "no-gpu", "gpu",
    ]  # fmt: skip
    for gpu in gpus.scenario.gpus:
        assert f"GPU {gpu.index}" in pod.log()
    left = kubelet.cri.list_pod_sandbox(pb.ListPodSandboxRequest()).items
    assert [each.metadata.name for each in left if each.metadata.name != "verify"] == []
    assert "verify" not in world.do("ls /run/containerd-shim-nvidia").split()


def test_pods_of_users_say_whether_they_have_what_they_requested(
    kubelet: Kubelet, gpus: SimulatedNode, built_tree: Tree
) -> None:
    jobs = _jobs()
    _prepare(kubelet, built_tree)
    _configure(kubelet)
    names = [gpu.uuid for gpu in gpus.scenario.gpus]
    one, both = (ContainerAllocateResponse(envs={_DEVICES: text}) for text in
                 (names[0], ",".join(names)))  # fmt: skip
    for job, answer, code, line in (
        ("verify-gpu", one, 0, "passed  1 GPU, as requested"),
        ("verify-gpu", both, 1, "seen: 2 GPUs"),
        ("verify-gpu", None, 1, "seen: 0 GPUs"),
        ("verify-no-gpu", None, 0, "passed  0 GPUs, as requested"),
        ("verify-no-gpu", one, 1, "seen: 1 GPU"),
    ):
        _, pod = kubelet.run_daemon_set(jobs[job], image=IMAGE, answer=answer)
        assert pod.exit_code() == code, pod.log()
        assert line in pod.log()
