"""A pod's author has no way to get another pod's GPU: only the kubelet grants devices."""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Any, Final

import pytest

from api.proto import cri_pb2 as pb
from api.proto import deviceplugin_pb2
from hooks.requests.kubelet_record import CHECKPOINT
from integration.cri.errors import CriRefused
from tests.harness.launcher import REPOSITORY
from tests.harness.nvshim import nvshim
from tests.harness.pods import IDLE
from tools.images import GLIBC

if TYPE_CHECKING:
    from collections.abc import Callable

    from integration.simulated import SimulatedNode
    from tests.harness.pods import Pod, PodContainer, Pods

DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
BELOW: Final = "/var/run/nvidia-container-devices"
PLUGIN: Final = "k8s.device-plugin.nvidia.com/gpu="
RECORDED: Final = os.path.join(REPOSITORY, "tests", "recorded", "kubernetes-1.36", "kubelet")
SEEN: Final = re.compile(r"nvidia(\d)")


@pytest.fixture
def uuids(two_gpus: SimulatedNode) -> list[str]:
    return [gpu.uuid for gpu in two_gpus.scenario.gpus]


def seen(container: PodContainer) -> list[int]:
    """Return the GPUs that have a device node in the container."""
    return sorted(int(n) for n in SEEN.findall(container.exec("ls", "/dev").stdout))


def denied(container: PodContainer) -> str:
    """Return the single reason why a container was denied its request."""
    with open(os.path.join(container.bundle, "nvidia.json"), encoding="utf-8") as file:
        (reason,) = json.load(file)["policy"]["denied"]
    return str(reason)


def start(pod: Pod, **fields: Any) -> PodContainer:
    return pod.start(*IDLE, image=GLIBC, **fields)


def null(name: str) -> list[pb.Mount]:
    return [pb.Mount(host_path="/dev/null", container_path=f"{BELOW}/{name}")]


def test_pod_that_knows_the_uuid_of_another_pods_gpu_does_not_get_it(
    gpus: Pods, uuids: list[str]
) -> None:
    one, two = gpus.run(), gpus.run()
    owner = start(one, name="main", granted={DEVICES: uuids[0]})
    assert seen(owner) == [0]
    # Every container can read the node's UUIDs below /proc/driver/nvidia.
    thief = start(two, name="main", env={DEVICES: uuids[0]})
    assert seen(thief) == []
    reason = denied(thief)
    assert f"container main of pod {two.config.metadata.uid}" in reason
    assert f"{gpus.kubelet.directory}/{CHECKPOINT}: nothing" in reason
    told = nvshim(
        "explain", "-v", thief.id, "--containerd-state", f"{gpus.containerd.directory}/state",
        "--config", gpus.containerd.shim_config,
    ).stdout  # fmt: skip
    assert f"{gpus.kubelet.directory}/{CHECKPOINT}: nothing" in told
    checked = nvshim(
        "ledger", "check", "--containerd-state", f"{gpus.containerd.directory}/state",
        "--config", gpus.containerd.shim_config, "--pod-resources", "/nonexistent",
    ).stdout  # fmt: skip
    title = f"tests/{two.config.metadata.name}/main"
    assert f"{title} was denied {DEVICES}={uuids[0]}: no device plugin gave it" in checked


@pytest.mark.parametrize("own", [False, True], ids=["without a GPU", "with a GPU of its own"])
def test_no_way_of_asking_gives_a_gpu_that_the_kubelet_did_not_give(
    gpus: Pods, uuids: list[str], configure: Callable[[str], None], *, own: bool
) -> None:
    with open(gpus.containerd.shim_config, encoding="utf-8") as file:
        configure(f'{file.read()}\n[requests]\nswarm-resources = ["DOCKER_RESOURCE_GPU"]\n')
    theirs, mine = uuids
    one, two = gpus.run(handler="annotated"), gpus.run(handler="annotated")
    start(one, name="main", granted={DEVICES: theirs})
    given = {"granted": {DEVICES: mine}} if own else {}
    ways: list[dict[str, Any]] = [  # tests/unit/hooks/requests/test_wishes.py tests the others
        {"env": {DEVICES: f"{mine},{theirs}"}},
        {"env": {DEVICES: f"{PLUGIN}{theirs}"}},
        {"env": {"DOCKER_RESOURCE_GPU": theirs, DEVICES: mine}},
        {"mounts": null("0"), "env": {DEVICES: BELOW}},
        {"mounts": null("all")},
        {"annotations": {"cdi.k8s.io/x": f"{PLUGIN}{theirs}"}},
        {"annotations": {"cdi.k8s.io/x": "nvidia.com/gpu=all"}},
    ]
    for number, way in enumerate(ways):
        try:
            container = start(two, name=f"c{number}", **given, **way)
        except CriRefused as refused:
            # An engine that applies CDI itself has no spec for these names.
            if "annotations" not in way or "unresolvable CDI devices" not in refused.said:
                raise
            continue
        # "all", in any form, means all granted devices.
        narrowed = own and "all" in str(way)
        assert seen(container) == ([1] if narrowed else []), way
        assert narrowed or "no device plugin gave it" in denied(container), way
        # Processes executed in it have no GPU either.
        assert container.exec("sh", "-c", f"{DEVICES}={theirs} ls /dev/nvidia0").code != 0
        container.stop()


def test_record_is_of_one_container_and_of_one_pod(gpus: Pods, uuids: list[str]) -> None:
    pod, again = gpus.run(), gpus.run()
    answer = deviceplugin_pb2.ContainerAllocateResponse(envs={DEVICES: uuids[0]})
    wish = {"env": {DEVICES: uuids[0]}}
    gpus.kubelet.record(pod.config.metadata.uid, "init", answer)
    gpus.kubelet.record(pod.config.metadata.uid, "main", answer)
    # The main container gets the init container's devices afterwards. A sidecar gets none of them,
    # and an ephemeral container gets none because the kubelet records nothing for it.
    for name, given in (("init", [0]), ("main", [0]), ("sidecar", []), ("debugger", [])):
        assert seen(start(pod, name=name, **wish)) == given, name
    # A pod that is recreated under the same name has another UID.
    later = start(again, name="main", **wish)
    assert seen(later) == []
    assert again.config.metadata.uid in denied(later)


def test_nothing_that_an_engine_hands_on_of_a_pods_annotations_makes_it_another(
    gpus: Pods, uuids: list[str], configure: Callable[[str], None]
) -> None:
    """The operator lets the engine pass on all of a pod's annotations, as CRI-O does by default."""
    owner = gpus.run()
    start(owner, name="main", granted={DEVICES: uuids[0]})
    with open(gpus.containerd.shim_config, encoding="utf-8") as file:
        configure(f'{file.read()}\n[policy]\ntrusted-namespaces = ["gpu-operator"]\n')
    uid = owner.config.metadata.uid
    for forged in (
        {"cdi.k8s.io/x": f"nvidia.com/gpu={uuids[0]}"},
        {"io.kubernetes.cri.sandbox-uid": uid},
        {"io.kubernetes.pod.uid": uid},
        {"io.kubernetes.pod.uid": uid, "io.kubernetes.cri-o.ContainerType": "container"},
        {"io.kubernetes.cri.sandbox-namespace": "gpu-operator"},
        {"io.kubernetes.pod.namespace": "gpu-operator"},
        {"io.kubernetes.cri-o.Namespace": "gpu-operator"},
    ):
        pod = gpus.run(handler="handing on", annotations=forged)
        container = start(pod, name="main", env={DEVICES: uuids[0]})
        with open(os.path.join(container.bundle, "config.json"), encoding="utf-8") as file:
            handed_on = json.load(file)["annotations"]
        assert forged.keys() <= handed_on.keys()
        assert seen(container) == [], forged


def test_static_pod_is_known_by_its_digest_and_a_privileged_one_needs_no_record(
    gpus: Pods, uuids: list[str]
) -> None:
    config = gpus.config()
    config.metadata.uid = "241085e86692375b15f08be531fd2a0f"
    static = gpus.run_config(config)
    assert seen(start(static, name="main", granted={DEVICES: uuids[1]})) == [1]
    assert seen(start(static, name="other", env={DEVICES: uuids[1]})) == []
    privileged = gpus.run(security=pb.LinuxSandboxSecurityContext(privileged=True))
    mine = pb.LinuxContainerSecurityContext(privileged=True)
    env = {DEVICES: uuids[0], "NVIDIA_DRIVER_CAPABILITIES": "utility"}
    container = start(privileged, security=mine, env=env)
    assert uuids[0] in container.exec("nvidia-smi", "-L").stdout


def test_claims_of_a_pod_give_their_cdi_names_to_it_alone(
    gpus: Pods, two_gpus: SimulatedNode, configure: Callable[[str], None], tmp_path: Any
) -> None:
    spec = {
        "cdiVersion": "0.6.0",
        "kind": "gpu.example.com/claim",
        "devices": [
            {"name": "1-gpu-0", "containerEdits": {"env": ["CLAIMED=gpu-0"]}},
        ],
    }
    (tmp_path / "claims.json").write_text(json.dumps(spec))
    root = gpus.kubelet
    with open(gpus.containerd.shim_config, encoding="utf-8") as file:
        configure(f'{file.read()}\n[cdi]\nspec-dirs = ["{tmp_path}"]\n')
    pod, other = gpus.run(), gpus.run()
    root.claim(pod.config.metadata.uid, "gpu.example.com/claim=1-gpu-0")
    wish = {DEVICES: "gpu.example.com/claim=1-gpu-0"}
    assert "CLAIMED=gpu-0" in start(pod, env=wish).exec("env").lines
    without = start(other, env=wish)
    assert "CLAIMED=gpu-0" not in without.exec("env").lines
    assert "dra_manager_state: nothing" in denied(without)


def test_records_of_a_real_kubelet_decide_for_its_pods(gpus: Pods, uuids: list[str]) -> None:
    """The recorded node's GPUs are those of this simulated node."""
    shutil.copy(
        os.path.join(RECORDED, "checkpoint-envvar.json"),
        os.path.join(gpus.kubelet.directory, CHECKPOINT),
    )
    os.chmod(os.path.join(gpus.kubelet.directory, CHECKPOINT), 0o600)
    recorded = uuids[0]
    config = gpus.config()
    config.metadata.uid = "b3808049-9bfc-42a5-ab85-64728294433a"
    pod, asking = gpus.run_config(config), gpus.run()
    asks = {"env": {DEVICES: recorded}, "name": "main"}
    assert seen(start(pod, **asks)) == [0]
    assert seen(start(asking, **asks)) == []


def test_without_a_record_on_the_node_nothing_was_given(
    gpus: Pods, uuids: list[str], configure: Callable[[str], None]
) -> None:
    with open(gpus.containerd.shim_config, encoding="utf-8") as file:
        text = file.read()
    nowhere = f"{gpus.containerd.directory}/no-kubelet"
    configure(text.replace("[node]\n", f'[node]\nkubelet-root = "{nowhere}"\n'))
    pod = gpus.run()
    container = start(pod, env={DEVICES: uuids[0]})
    assert seen(container) == []
    assert f"{nowhere}/{CHECKPOINT}: no such file" in denied(container)
    configure(text + '\n[policy]\nmode = "nvidia"\n')
    assert seen(start(pod, env={DEVICES: uuids[0]})) == [0]
