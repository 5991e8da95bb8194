"""The installer as its DaemonSet runs it: the rendered manifest, its image, a real containerd.

The machine is this one under a cover (:mod:`tests.harness.world`); the pods are what a kubelet
would make of the manifests (:mod:`tests.harness.kubelet`), with the image of ``make image``.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final

import pytest

from api.proto import cri_pb2 as pb
from integration.dist.build import build
from integration.dist.inputs import Inputs
from integration.dist.manifest import MANIFEST, read_tree
from integration.images import GLIBC, PAUSE, Directory, glibc, pause, write_archive
from integration.kubernetes.containerfile import CONTAINERFILE, IMAGE, read_containerfile
from integration.simulated import Scenario, SimulatedNode
from tests.harness.kubectl import Kubectl, render
from tests.harness.kubelet import Container, Kubelet
from tests.harness.launcher import REPOSITORY
from tests.harness.waiting import eventually
from tests.harness.world import World, write_image

if TYPE_CHECKING:
    from collections.abc import Iterator

STATUS: Final = "/run/containerd-shim-nvidia/node-installer.json"
CONFIG: Final = "/etc/containerd/config.toml"
VALIDATIONS: Final = "/run/nvidia/validations"

# As an administrator has it; the rest is for a machine without some capabilities.
_CONTAINERD: Final = f"""\
version = 2  # of this file
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
"""
_SYS_CHROOT: Final = 1 << 18


@pytest.fixture(scope="module")
def gpus(workshop: str) -> Iterator[SimulatedNode]:
    with SimulatedNode.create(f"{workshop}/kubernetes-node", Scenario.load("two")) as node:
        yield node


@pytest.fixture(scope="module")
def images(workshop: str) -> str:
    cache = os.path.join(REPOSITORY, ".cache", "dist")
    build(os.path.join(cache, "tree"), Inputs.of(), cache=cache)
    ours = read_containerfile(CONTAINERFILE, context=cache)
    return write_archive(os.path.join(workshop, "kubernetes.tar"), [ours, pause(), glibc()])


@pytest.fixture
def kubelet(gpus: SimulatedNode, images: str, workshop: str) -> Iterator[Kubelet]:
    image = write_image(os.path.join(workshop, "kubernetes-world.tar"))
    with World(gpus, image) as world:
        _do(world, f"cat >{CONFIG} <<'end'\n{_CONTAINERD}end")
        # As systemd has it; a container may see what is mounted on the node after it has begun.
        _do(world, "mount --make-rshared /")
        _do(world, f"systemctl restart containerd && ctr -n k8s.io images import {images}")
        with Kubelet(world) as kubelet:
            yield kubelet
    kubelet.remove_cgroups()


def _do(world: World, command: str) -> str:
    done = world.run(command)
    assert done.status == 0, done.output
    return done.output


def _installer(*components: str) -> dict[str, Any]:
    """The installer's DaemonSet beside the GPU operator, rendered."""
    rendered = render(Kubectl.of_release("trixie"), "beside-gpu-operator", *components)
    sets = [each for each in rendered if each["kind"] == "DaemonSet"]
    (found,) = (each for each in sets if each["metadata"]["name"] == "installer")
    # Twenty looks a second in place of one in five.
    found["spec"]["template"]["spec"]["containers"][0]["env"].append(
        {"name": "NVSHIM_INTERVAL", "value": "0.05"}
    )
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


def _gpu_pod(kubelet: Kubelet, uuid: str) -> Container:
    """A pod of the RuntimeClass, with what a device plugin gives it: a UUID."""
    pod = kubelet.run_pod("cuda", handler="nvidia")
    config = pb.ContainerConfig(
        metadata=pb.ContainerMetadata(name="cuda"),
        image=pb.ImageSpec(image=GLIBC),
        command=["sh", "-c", "ls /dev; probe dlopen libcuda.so.1 libnvidia-ml.so.1"],
        envs=[pb.KeyValue(key="NVIDIA_VISIBLE_DEVICES", value=uuid.encode())],
    )
    return kubelet.start(pod, config, {})


def test_the_image_is_the_tree_and_an_archive_of_it(images: str) -> None:
    tree = read_tree(os.path.join(REPOSITORY, ".cache", "dist", "tree"))
    image = read_containerfile(CONTAINERFILE, context=os.path.dirname(tree.path))
    files = {path for path, node in image.tree.items() if not isinstance(node, Directory)}
    assert files == {f"nvshim/{name}" for name in (*tree.files, MANIFEST)}
    assert os.path.getsize(images) < 200 << 20


# Two installations and a removal, by a tree's own interpreter, on a machine that may be busy.
@pytest.mark.timeout(150)
def test_from_an_empty_node_to_a_pod_with_a_gpu_and_back(
    kubelet: Kubelet, gpus: SimulatedNode
) -> None:
    world = kubelet.world
    before = kubelet.read(CONFIG)
    manifest = _installer()
    _, installer = kubelet.run_daemon_set(manifest, image=IMAGE)

    # It waits for the operator's validator.
    _reaches(kubelet, installer, "waiting-for-driver")
    assert installer.probe("startup").code == 0
    assert installer.probe("readiness").code == 1
    assert not os.path.exists(world.path("/opt/containerd-shim-nvidia/current"))

    # It is root of files, and of nothing else.
    pid = int(_do(world, "pgrep -f 'nvshim.* node-installer' | head -1"))
    status = dict(
        line.split(":\t", 1)
        for line in _do(world, f"cat /proc/{pid}/status").splitlines()
        if ":\t" in line
    )
    for kind in ("CapEff", "CapPrm", "CapBnd"):
        assert int(status[kind], 16) == _SYS_CHROOT, status
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    refused = _do(world, f"touch /proc/{pid}/root/host/usr/x /proc/{pid}/root/x 2>&1 || :")
    assert refused.count("Read-only file system") == 2

    # Of two, one works.
    _, second = kubelet.run_daemon_set(manifest, image=IMAGE)
    assert second.exit_code() == 1
    assert "NVSHIM-E2660 installer-running" in second.log()

    # The driver is ready: everything is put in place, and nothing restarted.
    _do(world, f"mkdir -p {VALIDATIONS} && printf 'IS_HOST_DRIVER=false\\nNVIDIA_DRIVER_ROOT="
        f"{gpus.driver_root}\\n' >{VALIDATIONS}/driver-ready")  # fmt: skip
    _reaches(kubelet, installer, "restart-outstanding")
    assert installer.probe("readiness").code == 1
    assert _status(kubelet)["driver_root"] == gpus.driver_root
    assert kubelet.read(CONFIG).startswith(before)
    assert "io.containerd.nvidia.v1" in kubelet.read(CONFIG)
    assert not os.path.exists(world.path(f"{VALIDATIONS}/toolkit-ready"))
    assert _do(world, "nvshim status -o json >/tmp/$$; echo $?").strip() in {"0", "3"}

    # Somebody restarts containerd, and it notices.
    _do(world, "systemctl restart containerd")
    kubelet.reconnect()
    _reaches(kubelet, installer, "ready")
    assert installer.probe("readiness").code == 0
    assert installer.probe("liveness").code == 0
    assert os.path.exists(world.path(f"{VALIDATIONS}/toolkit-ready"))

    # A pod of the RuntimeClass has its GPU, and the driver's libraries.
    cuda = _gpu_pod(kubelet, gpus.scenario.gpus[0].uuid)
    assert cuda.exit_code() == 0, cuda.log()
    assert "nvidia0" in cuda.log().split()
    assert "nvidia1" not in cuda.log().split()

    # Told to end, it leaves all of it.
    installer.stop(manifest["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])
    assert installer.exit_code() == 0, installer.log()
    assert _status(kubelet)["state"] == "ended"
    configured = kubelet.read(CONFIG)
    tree = os.readlink(world.path("/opt/containerd-shim-nvidia/current"))

    # Another one finds nothing to do; and asked to clean up, leaves nothing.
    for pod in kubelet.cri.list_pod_sandbox(pb.ListPodSandboxRequest()).items:
        kubelet.remove_pod(pod.id)
    _, again = kubelet.run_daemon_set(_installer("remove-on-exit"), image=IMAGE)
    _reaches(kubelet, again, "ready")
    assert kubelet.read(CONFIG) == configured
    assert os.readlink(world.path("/opt/containerd-shim-nvidia/current")) == tree
    again.stop(60)
    assert again.exit_code() == 0, again.log()
    assert kubelet.read(CONFIG) == before, again.log()
    left = _do(
        world, "ls -A /opt/containerd-shim-nvidia /usr/local/bin; ls /run/nvidia/validations"
    )
    assert tree not in left, again.log()
    assert "nvshim" not in left, again.log()
    assert "toolkit-ready" not in left, again.log()
