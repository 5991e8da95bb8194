"""A container that runs without the device that the kubelet has given it, and its like.

The specs are those that a real containerd made for a real kubelet (tests/recorded); the kubelet's
word comes by its own API, and the node's processes are shown by a procfs that is made here.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final

import pytest

from api.proto import deviceplugin_pb2 as pb
from integration.inspection.bundles import TASKS
from tests.harness.kubelet_plugins import Assignment, KubeletPlugins
from tests.harness.launcher import REPOSITORY
from tests.harness.nvshim import nvshim

if TYPE_CHECKING:
    from pathlib import Path

    from integration.simulated import SimulatedNode

RECORDED: Final = os.path.join(REPOSITORY, "tests", "recorded", "kubernetes-1.36", "specs")
# enable_cdi was not set: the spec has nothing of the device, and the pod was Running and Ready.
WITHOUT: Final = "containerd-1.7.24/nvidia/gpu-one.main.enable_cdi-unset.json"
WITH: Final = "containerd-2.1.9/nvidia/gpu-one.main.json"
PRIVILEGED: Final = "containerd-2.1.9/nvidia/privileged.main.json"

_CONTAINER: Final = "f" * 64


@pytest.mark.parametrize(
    ("recorded", "runs", "code", "pid", "late"),
    [
        (WITHOUT, True, 3, 77, 2.5),  # a kubelet that has much to do
        (WITHOUT, False, 0, 0, 0),  # its image may not be there yet
        (WITH, True, 0, None, 0),
        (PRIVILEGED, True, 0, None, 0),  # it has every node of the host
    ],
)
def test_what_the_kubelet_gave_and_a_running_container_does_not_have_is_a_fault(
    own_gpus: SimulatedNode,
    tmp_path: Path,
    recorded: str,
    runs: bool,
    code: int,
    pid: int | None,
    late: float,
) -> None:
    with open(os.path.join(RECORDED, recorded), encoding="utf-8") as file:
        spec = json.load(file)["spec"]
    bundle = tmp_path / "state" / TASKS / "k8s.io" / _CONTAINER
    proc, shim = tmp_path / "proc" / "77", tmp_path / "proc" / "76"
    for directory in (bundle, proc, shim):
        directory.mkdir(parents=True)
    (bundle / "config.json").write_text(json.dumps(spec))
    (proc / "stat").write_text("77 (sleep) S 76 " + "0 " * 40)
    (shim / "stat").write_text("76 (containerd-shim) S 1 " + "0 " * 40)
    (shim / "cmdline").write_text("/usr/bin/containerd-shim-runc-v2")
    (proc / "cgroup").write_text(f"0::/kubepods/besteffort/pod/{_CONTAINER}\n")
    if runs:
        (bundle / "init.pid").write_text("77")
    annotations = spec["annotations"]
    pod = annotations["io.kubernetes.cri.sandbox-name"]
    uuid = own_gpus.scenario.gpus[0].uuid
    given = Assignment(
        pod, "default", "main", "nvidia.com/gpu", (uuid,), pb.ContainerAllocateResponse()
    )
    socket = str(tmp_path / "pod-resources.sock")
    with KubeletPlugins(str(tmp_path / "plugins"), pod_resources=socket) as kubelet:
        kubelet.assignments.append(given)
        kubelet.late = late
        words = (
            "ledger", "check", "--config", own_gpus.config_path, "--pod-resources", socket,
            "--containerd-state", str(tmp_path / "state"), "--procfs", str(tmp_path / "proc"),
        )  # fmt: skip
        checked = nvshim(*words, "-o", "json", check=False)
        shown = nvshim(*words, "-o", "wide", check=False)
    unheld: list[dict[str, Any]] = checked.document["unheld"]
    assert (checked.code, shown.code) == (code, code), checked.stderr
    if pid is None:
        assert unheld == []
        return
    uid = annotations["io.kubernetes.cri.sandbox-uid"] if pid else ""
    assert unheld == [
        {"namespace": "default", "pod": pod, "container": "main", "resource": "nvidia.com/gpu",
         "device": uuid, "pid": pid, "pod_uid": uid}
    ]  # fmt: skip
    assert ("process 77" in shown.stdout) is bool(pid)
    assert uuid in shown.stdout
