"""The installer as its DaemonSet runs it: the rendered manifest, its image, a real containerd.

The node is this machine in private namespaces (:mod:`tests.harness.world`). The pods are those that
a kubelet would create from the manifests (:mod:`tests.harness.kubelet`), with the image of
``make image``.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

from api.proto import cri_pb2 as pb
from api.proto.deviceplugin_pb2 import ContainerAllocateResponse
from integration.simulated import SimulatedNode
from integration.tree import MANIFEST, Tree
from tests.harness.kubectl import Kubectl, render
from tests.harness.kubelet import Container, Kubelet
from tests.harness.waiting import eventually
from tools.images import GLIBC, Directory
from tools.node_image import IMAGE, node_image

STATUS: Final = "/run/containerd-shim-nvidia/node-installer.json"
CONFIG: Final = "/etc/containerd/config.toml"
VALIDATIONS: Final = "/run/nvidia/validations"

_SYS_CHROOT: Final = 1 << 18


def _installer(*components: str) -> dict[str, Any]:
    """Render the installer's DaemonSet for a cluster with the GPU operator."""
    rendered = render(Kubectl.of_release("trixie"), "beside-gpu-operator", *components)
    sets = [each for each in rendered if each["kind"] == "DaemonSet"]
    (found,) = (each for each in sets if each["metadata"]["name"] == "installer")
    # Poll twenty times a second instead of every five seconds.
    found["spec"]["template"]["spec"]["containers"][0]["env"] += [
        {"name": "NVSHIM_INTERVAL", "value": "0.05"},
        # The simulated GPUs are on no bus.
        {"name": "NVSHIM_EVERY_NODE", "value": "true"},
    ]
    return found


def _status(kubelet: Kubelet) -> dict[str, Any]:
    try:
        status: dict[str, Any] = json.loads(kubelet.read(STATUS))
    except FileNotFoundError:
        return {"state": None}
    return status


def _reaches(kubelet: Kubelet, container: Container, state: str) -> None:
    def look() -> bool:
        now = _status(kubelet)["state"]
        assert now != "failed", container.log()
        return bool(now == state)

    try:
        eventually(look, state, timeout=40)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{_status(kubelet)}\n{container.log()}") from error


def _damage(kubelet: Kubelet) -> None:
    """Damage a tree as a full disk or a lost write does."""
    world = kubelet.world
    world.do(": >/opt/containerd-shim-nvidia/current/lib/integration/cli/app.py")
    world.do("rm -r /opt/containerd-shim-nvidia/current/lib/integration/cli/__pycache__")
    assert world.run("nvshim --version").status != 0


def _gpu_pod(kubelet: Kubelet, uuid: str) -> Container:
    """Start a pod of the RuntimeClass with a device plugin's answer: a UUID."""
    pod = kubelet.run_pod("cuda", handler="nvidia")
    config = pb.ContainerConfig(
        metadata=pb.ContainerMetadata(name="cuda"),
        image=pb.ImageSpec(image=GLIBC),
        command=["sh", "-c", "ls /dev; probe dlopen libcuda.so.1 libnvidia-ml.so.1"],
        envs=[pb.KeyValue(key="NVIDIA_VISIBLE_DEVICES", value=uuid.encode())],
    )
    kubelet.record(pod, "cuda", ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": uuid}))
    return kubelet.start(pod, config, {})


def test_the_image_is_the_tree_and_an_archive_of_it(images: str, built_tree: Tree) -> None:
    image = node_image(built_tree.path)
    files = {path for path, node in image.tree.items() if not isinstance(node, Directory)}
    assert files == {f"nvshim/{name}" for name in (*built_tree.files, MANIFEST)}
    assert os.path.getsize(images) < 200 << 20


# Several installations and a removal with the tree's interpreter take long.
def test_from_an_empty_node_to_a_pod_with_a_gpu_and_back(
    kubelet: Kubelet, gpus: SimulatedNode
) -> None:
    world = kubelet.world
    before = kubelet.read(CONFIG)
    manifest = _installer()
    _, installer = kubelet.run_daemon_set(manifest, image=IMAGE)

    # The installer waits for the operator's validator.
    _reaches(kubelet, installer, "waiting-for-driver")
    assert installer.probe("startup").code == 0
    assert installer.probe("readiness").code == 1
    assert not os.path.exists(world.path("/opt/containerd-shim-nvidia/current"))

    # It has root's rights on files, and no other capabilities.
    pid = int(world.do("pgrep -f 'nvshim.* node-installer' | head -1"))
    status = dict(
        line.split(":\t", 1)
        for line in world.do(f"cat /proc/{pid}/status").splitlines()
        if ":\t" in line
    )
    for kind in ("CapEff", "CapPrm", "CapBnd"):
        assert int(status[kind], 16) == _SYS_CHROOT, status
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    refused = world.do(f"touch /proc/{pid}/root/host/usr/x /proc/{pid}/root/x 2>&1 || :")
    assert refused.count("Read-only file system") == 2

    # Of two installers, one works at a time.
    _, second = kubelet.run_daemon_set(manifest, image=IMAGE)
    assert second.exit_code() == 1
    assert "NVSHIM-E2660 installer-running" in second.log()

    # The driver is ready: the installer installs everything and restarts nothing.
    world.do(f"mkdir -p {VALIDATIONS} && printf 'IS_HOST_DRIVER=false\\nNVIDIA_DRIVER_ROOT="
        f"{gpus.driver_root}\\n' >{VALIDATIONS}/driver-ready")  # fmt: skip
    _reaches(kubelet, installer, "restart-outstanding")
    assert installer.probe("readiness").code == 1
    assert _status(kubelet)["driver_root"] == gpus.driver_root
    assert kubelet.read(CONFIG).startswith(before)
    assert "io.containerd.nvidia.v1" in kubelet.read(CONFIG)
    assert not os.path.exists(world.path(f"{VALIDATIONS}/toolkit-ready"))
    assert world.do("nvshim status -o json >/dev/null; echo $?").strip() in {"0", "3"}

    # The installer notices that containerd was restarted.
    world.do("systemctl restart containerd")
    kubelet.reconnect()
    _reaches(kubelet, installer, "ready")
    assert installer.probe("readiness").code == 0
    assert installer.probe("liveness").code == 0
    assert os.path.exists(world.path(f"{VALIDATIONS}/toolkit-ready"))

    # A pod of the RuntimeClass gets its GPU and the driver's libraries.
    cuda = _gpu_pod(kubelet, gpus.scenario.gpus[0].uuid)
    assert cuda.exit_code() == 0, cuda.log()
    assert "nvidia0" in cuda.log().split()
    assert "nvidia1" not in cuda.log().split()

    # The installer stops and leaves everything installed.
    installer.stop(manifest["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])
    assert installer.exit_code() == 0, installer.log()
    assert _status(kubelet)["state"] == "ended"
    configured = kubelet.read(CONFIG)
    tree = os.readlink(world.path("/opt/containerd-shim-nvidia/current"))

    for pod in kubelet.cri.list_pod_sandbox(pb.ListPodSandboxRequest()).items:
        kubelet.remove_pod(pod.id)

    # An operator adds a setting that the engine has not loaded: not ready.
    world.do("nvshim configure containerd --pod-annotation example.com/*")
    amended = kubelet.read(CONFIG)
    assert amended != configured
    _, other = kubelet.run_daemon_set(_installer(), image=IMAGE)
    _reaches(kubelet, other, "restart-outstanding")
    assert _status(kubelet)["restart_outstanding"] is True
    assert "pod_annotations" in _status(kubelet)["message"]
    assert other.probe("readiness").code == 1
    assert kubelet.read(CONFIG) == amended, "the operator's settings stay"
    world.do("systemctl restart containerd")
    kubelet.reconnect()
    _reaches(kubelet, other, "ready")
    other.stop(60)
    world.do("nvshim configure containerd --remove && nvshim configure containerd")
    assert kubelet.read(CONFIG) == configured
    world.do("systemctl restart containerd")
    kubelet.reconnect()
    for pod in kubelet.cri.list_pod_sandbox(pb.ListPodSandboxRequest()).items:
        kubelet.remove_pod(pod.id)

    # A second installer finds a damaged tree, and installs its own next to it.
    _damage(kubelet)
    _, again = kubelet.run_daemon_set(_installer("remove-on-exit"), image=IMAGE)
    _reaches(kubelet, again, "ready")
    assert kubelet.read(CONFIG) == configured
    assert os.readlink(world.path("/opt/containerd-shim-nvidia/current")) == f"{tree}.2"
    world.do("nvshim --version")

    # The cleanup leaves nothing, not even of a damaged tree.
    _damage(kubelet)
    again.stop(60)
    assert again.exit_code() == 0, again.log()
    assert kubelet.read(CONFIG) == before, again.log()
    left = world.do("ls -A /opt/containerd-shim-nvidia /usr/local/bin; ls /run/nvidia/validations")
    assert tree not in left, again.log()
    assert "nvshim" not in left, again.log()
    assert "toolkit-ready" not in left, again.log()
