"""The Job that verifies a node, as a kubelet would run its pod: in the node's root, by its tree."""

from __future__ import annotations

import os
import re
from typing import Any, Final

import yaml

from api.proto import cri_pb2 as pb
from integration.simulated import SimulatedNode
from integration.tree import Tree
from tests.harness.kubectl import MANIFESTS, Kubectl
from tests.harness.kubelet import Kubelet
from tests.harness.kubelet_plugins import KubeletPlugins
from tests.tools.node_image import IMAGE

_PREFIX: Final = "/opt/containerd-shim-nvidia"
_OUTCOME: Final = re.compile(r"^(passed|failed|skipped) +(\S+)", re.MULTILINE)


def _job() -> dict[str, Any]:
    text = Kubectl.of_release("trixie")("kustomize", os.path.join(MANIFESTS, "verify"))
    job: dict[str, Any] = yaml.safe_load(text)
    return job


def test_the_job_tells_what_it_has_found_and_leaves_nothing(
    kubelet: Kubelet, gpus: SimulatedNode, built_tree: Tree
) -> None:
    world = kubelet.world
    world.do(
        f"mkdir -p {_PREFIX} && ln -s {built_tree.path} {_PREFIX}/current\n"
        f"ln -s {_PREFIX}/current/bin/* /usr/local/bin/\n"
        "nvshim devices create"
    )
    # Nobody has configured the handler yet.
    _, pod = kubelet.run_daemon_set(_job(), image=IMAGE)
    assert pod.exit_code() == 1, pod.log()
    assert "failed  handler" in pod.log()
    world.do("nvshim configure containerd && systemctl restart containerd")
    kubelet.reconnect()
    directory = world.path("/var/lib/kubelet/device-plugins")
    resources = world.path("/var/lib/kubelet/pod-resources/kubelet.sock")
    with KubeletPlugins(directory, pod_resources=resources):
        _, pod = kubelet.run_daemon_set(_job(), image=IMAGE)
        assert pod.exit_code() == 1, pod.log()
    told = {found[2]: found[1] for found in _OUTCOME.finditer(pod.log())}
    # A kubelet is there, and nobody has registered with it.
    assert told.pop("plugin") == "failed"
    assert [name for name, outcome in told.items() if outcome == "passed"] == [
        "handler", "exit", "exec", "no-gpu", "gpu",
    ]  # fmt: skip
    for gpu in gpus.scenario.gpus:
        assert f"GPU {gpu.index}" in pod.log()
    left = kubelet.cri.list_pod_sandbox(pb.ListPodSandboxRequest()).items
    assert [each.metadata.name for each in left if each.metadata.name != "verify"] == []
    assert "verify" not in world.do("ls /run/containerd-shim-nvidia").split()
