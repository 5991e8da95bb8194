"""Pods whose root is another user on the host: ``hostUsers: false``."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from api.proto import cri_pb2 as pb
from integration.simulated import SimulatedNode
from integration.simulated.tree import DRM_MAJOR, video_group
from shim import PROGRAM
from tests.harness.containerds import nothing_left
from tests.harness.low_level import crun_for_this_host
from tests.harness.pods import IDLE, Pods, containerd_for_pods
from tests.harness.releases import UNSTABLE
from tests.harness.runtime import OURS, STOCK
from tools.cri.plugin import CriContainerd, CriPlugin
from tools.images import GLIBC, PAUSE, busybox, glibc, pause
from tools.parts import Parts

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif(
        os.environ.get("NVSHIM_TEST_RUNTIME") == STOCK, reason="it is about our handler"
    ),
]

HANDLER: Final = "nvidia"
FIRST_ID: Final = 200_000
IDS: Final = pb.IDMapping(container_id=0, host_id=FIRST_ID, length=65_536)
# The kubelet's form.
MAPPED: Final = pb.NamespaceOption(
    pid=pb.CONTAINER,
    userns_options=pb.UserNamespace(mode=pb.POD, uids=[IDS], gids=[IDS]),
)


@pytest.fixture(scope="module", params=["podsandbox", "shim", "runc", "crun"])
def new_containerd(
    request: pytest.FixtureRequest, shim_directory: str, shim_config: str, workshop: str
) -> Iterator[CriContainerd]:
    """Return a containerd with such pods, held by it or by the shim, run by runc or crun."""
    parts = Parts.of_release(UNSTABLE)
    handler: dict[str, Any] = {"runtime_type": OURS, "sandboxer": "podsandbox"}
    if request.param == "shim":
        handler["sandboxer"] = "shim"
    elif request.param != "podsandbox":
        # For such pods containerd 2.1 parses any options table as runc's.
        program = (
            crun_for_this_host(workshop, parts.crun) if request.param == "crun" else parts.runc
        )
        handler |= {"runtime_type": STOCK, "runtime_path": os.path.join(shim_directory, PROGRAM)}
        handler["options"] = {"BinaryName": program}
    plugin = CriPlugin({HANDLER: handler}, PAUSE, HANDLER)
    with containerd_for_pods(
        busybox(),
        glibc(),
        pause(),
        shim_directory=shim_directory,
        shim_config=shim_config,
        parts=parts,
        cri=plugin,
    ) as containerd:
        yield containerd


@pytest.fixture
def pods(new_containerd: CriContainerd) -> Iterator[Pods]:
    """Return its pods. The test fails if they leave anything."""
    with nothing_left(new_containerd):
        pods = Pods(new_containerd, HANDLER)
        yield pods
        pods.close()


def test_containers_of_such_a_pod_own_their_files(pods: Pods) -> None:
    pod = pods.run(namespaces=MAPPED)
    first, second = pod.start(*IDLE), pod.start(*IDLE, image=GLIBC)
    for container in (first, second):
        with open(f"/proc/{container.pid}/uid_map", encoding="ascii") as file:
            assert file.read().split() == ["0", str(FIRST_ID), "65536"]
        done = container.exec("sh", "-c", "stat -c %u:%g / /bin/sh; touch /new; stat -c %u /new")
        assert done.lines == ["0:0", "0:0", "0"], done.stderr
        assert os.stat(f"/proc/{container.pid}/root/new").st_uid == FIRST_ID


def test_container_of_such_a_pod_has_its_gpu(
    pods: Pods, two_gpus: SimulatedNode, configure: Callable[..., None]
) -> None:
    configure(node=two_gpus)
    devices = {"NVIDIA_VISIBLE_DEVICES": two_gpus.scenario.gpus[1].uuid}
    container = pods.run(namespaces=MAPPED).start(*IDLE, image=GLIBC, granted=devices)
    done = container.exec(
        "sh", "-c", "nvidia-smi -L; ls /dev/nvidia[0-9]; stat -c %u /etc/ld.so.cache"
    )
    assert done.code == 0, done.stderr
    assert done.stdout.count("UUID: GPU-") == 1
    assert done.lines[1:] == ["/dev/nvidia1", "0"]


@pytest.fixture
def drm_node() -> Iterator[str]:
    """Yield a DRM node of the machine: runtimes mount engine-applied nodes from the host."""
    path = "/dev/dri/renderD255"
    had_directory = os.path.isdir("/dev/dri")
    os.makedirs("/dev/dri", exist_ok=True)
    os.mknod(path, stat.S_IFCHR, os.makedev(DRM_MAJOR, 255))
    os.chmod(path, 0o660)
    os.chown(path, 0, video_group())
    yield path
    os.unlink(path)
    if not had_directory:
        os.rmdir("/dev/dri")


def test_node_that_a_plugin_has_listed_can_be_opened_too(pods: Pods, drm_node: str) -> None:
    device = pb.Device(container_path=drm_node, host_path=drm_node, permissions="rw")
    container = pods.run(namespaces=MAPPED).start(*IDLE, image=GLIBC, devices=[device])
    script = f'stat -c "%u:%g %a" {drm_node}; (: <>{drm_node}) 2>&1'
    owner, said = container.exec("sh", "-c", script).lines
    assert owner == f"0:{video_group()} 660"
    assert "No such device or address" in said
    assert not os.path.exists(os.path.join(container.bundle, "nvidia.json"))


# No kernel module is behind the driver's nodes here. So a node that may be opened answers ENXIO.
# Otherwise it answers EACCES (by its mode) or EPERM (by the container's device rules).
OPEN: Final = """
for node in /dev/nvidia1 /dev/nvidiactl /dev/dri/card1 /dev/dri/renderD129; do
    stat -c '%n %u:%g %a' $node
    said=$( (: <>$node) 2>&1 ); echo "${said##*: }"
done
"""


@pytest.mark.parametrize("user", [0, 1000])
def test_nodes_of_such_a_pod_can_be_opened(
    pods: Pods, two_gpus: SimulatedNode, configure: Callable[..., None], user: int
) -> None:
    configure(node=two_gpus)
    security = pb.LinuxContainerSecurityContext(
        namespace_options=MAPPED, run_as_user=pb.Int64Value(value=user)
    )
    granted = {"NVIDIA_VISIBLE_DEVICES": two_gpus.scenario.gpus[1].uuid}
    container = pods.run(namespaces=MAPPED).start(
        *IDLE,
        image=GLIBC,
        security=security,
        env={"NVIDIA_DRIVER_CAPABILITIES": "all"},
        granted=granted,
    )
    done = container.exec("sh", "-c", OPEN)
    nodes, opened = done.lines[::2], done.lines[1::2]
    assert set(opened) == {"No such device or address"}, done
    video = video_group()
    assert [line.split()[1:] for line in nodes[2:]] == [[f"0:{video}", "660"]] * 2
    # The nodes on the host are unchanged.
    assert os.stat(f"{two_gpus.dev}/dri/card1").st_gid == video
