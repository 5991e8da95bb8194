"""Pods whose root is another user on the host, as ``hostUsers: false`` asks for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from api.proto import cri_pb2 as pb
from integration.simulated import SimulatedNode
from tests.harness.containerds import nothing_left
from tests.harness.pods import IDLE, Pods, containerd_for_pods
from tests.harness.releases import UNSTABLE
from tests.harness.runtime import OURS, STOCK
from tests.tools.cri.plugin import CriContainerd, CriPlugin
from tests.tools.images import GLIBC, PAUSE, busybox, glibc, pause
from tests.tools.parts import Parts

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif(
        os.environ.get("NVSHIM_TEST_RUNTIME") == STOCK, reason="it is about our handler"
    ),
]

HANDLER: Final = "nvidia"
FIRST_ID: Final = 200_000
IDS: Final = pb.IDMapping(container_id=0, host_id=FIRST_ID, length=65_536)
# As a kubelet says it.
MAPPED: Final = pb.NamespaceOption(
    pid=pb.CONTAINER,
    userns_options=pb.UserNamespace(mode=pb.POD, uids=[IDS], gids=[IDS]),
)


@pytest.fixture(scope="module", params=["podsandbox", "shim"])
def new_containerd(
    request: pytest.FixtureRequest, shim_directory: str, shim_config: str
) -> Iterator[CriContainerd]:
    """A containerd that knows such pods; who holds them is either it or the shim."""
    handlers: dict[str, Any] = {HANDLER: {"runtime_type": OURS, "sandboxer": request.param}}
    plugin = CriPlugin(handlers, PAUSE, HANDLER)
    with containerd_for_pods(
        busybox(),
        glibc(),
        pause(),
        shim_directory=shim_directory,
        shim_config=shim_config,
        parts=Parts.of_release(UNSTABLE),
        cri=plugin,
    ) as containerd:
        yield containerd


@pytest.fixture
def pods(new_containerd: CriContainerd) -> Iterator[Pods]:
    """Pods of it; the test fails if anything of them is left."""
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
