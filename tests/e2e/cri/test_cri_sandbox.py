"""Pods whose namespaces the shim holds itself: ``sandboxer = "shim"`` of containerd 2.x."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import pytest

from api.proto import cri_pb2 as pb
from integration.cri.errors import CriError
from integration.simulated import Scenario, SimulatedNode
from tests.harness.leaks import Census, describe
from tests.harness.pods import IDLE, Pod, PodContainer, Pods, containerd_for_pods
from tests.harness.releases import UNSTABLE
from tests.harness.runtime import OURS, STOCK, is_alive
from tests.harness.waiting import eventually
from tools.cri.plugin import CriContainerd, CriPlugin
from tools.images import GLIBC, PAUSE, busybox, glibc
from tools.parts import Parts

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif(
        os.environ.get("NVSHIM_TEST_RUNTIME") == STOCK, reason="containerd's own shim holds no pods"
    ),
]

HANDLER: Final = "nvidia"
DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
CAPABILITIES: Final = "NVIDIA_DRIVER_CAPABILITIES"


@pytest.fixture(scope="module")
def new_containerd(shim_directory: str, workshop: str, parts: Parts) -> Iterator[CriContainerd]:
    """Return a containerd with the sandbox API, without a pause image, on a node with GPUs."""
    if parts.version < (2, 0):
        parts = Parts.of_release(UNSTABLE)
    # containerd does not accept an options table here: see docs/engines.md.
    handlers = {HANDLER: {"runtime_type": OURS, "sandboxer": "shim"}}
    plugin = CriPlugin(handlers, sandbox_image=PAUSE, default_handler=HANDLER)
    node = SimulatedNode.create(f"{workshop}/cri-sandbox", Scenario.load("two"))
    with (
        node,
        containerd_for_pods(
            busybox(),
            glibc(),
            shim_directory=shim_directory,
            shim_config=node.config_path,
            cri=plugin,
            parts=parts,
        ) as containerd,
    ):
        yield containerd


@pytest.fixture
def pods(new_containerd: CriContainerd) -> Iterator[Pods]:
    """Return pods that the shim holds. The test fails if they leave anything."""
    if not new_containerd.pid:
        new_containerd.start()
    census = Census(new_containerd)
    pods = Pods(new_containerd, HANDLER)
    yield pods
    if not new_containerd.pid:
        new_containerd.start()
    pods.close()
    left = census.leftovers()
    if left:
        message = describe(left, new_containerd.log())
        census.remove(left)
        pytest.fail(message, pytrace=False)


def _namespace(container: PodContainer, kind: str) -> str:
    return os.readlink(f"/proc/{container.pid}/ns/{kind}")


def _holder(pod: Pod) -> int:
    """Return the process that holds a pod's namespaces."""
    (shim,) = pod.shims
    with open(f"/proc/{shim}/task/{shim}/children") as file:
        children = [int(word) for word in file.read().split()]
    names = {}
    for child in children:
        with (
            suppress(FileNotFoundError, ProcessLookupError),  # the process has exited since
            open(f"/proc/{child}/comm") as file,
        ):
            names[file.read().strip()] = child
    return names["sandbox"]


def _start_again(pods: Pods) -> None:
    if not pods.containerd.pid:
        pods.containerd.start()
    eventually(lambda: _answers(pods), "the CRI answers")


def _answers(pods: Pods) -> bool:
    try:
        pods.ids()
    except CriError:
        return False
    return True


def _is_over(pod: Pod) -> bool:
    """Whether the CRI reports a pod as not ready; it reports nothing while the shim exits."""
    try:
        return not pod.is_ready
    except CriError:
        return False


def test_pod_without_a_pause_container(pods: Pods) -> None:
    before = time.time_ns()
    pod = pods.run(hostname="shared-name")
    first, second = pod.start(*IDLE), pod.start(*IDLE)
    listed = pods.containerd.ctr("containers", "ls", "--quiet", namespace="k8s.io").lines
    assert sorted(filter(None, listed)) == sorted([first.id, second.id])
    for kind in ("net", "ipc", "uts", "pid", "mnt"):
        shared = kind in ("net", "ipc", "uts")
        assert (_namespace(first, kind) == _namespace(second, kind)) is shared, kind
        assert _namespace(first, kind) != os.readlink(f"/proc/self/ns/{kind}"), kind
        assert (_namespace(first, kind) == os.readlink(f"/proc/{_holder(pod)}/ns/{kind}")) is shared
    assert second.exec("hostname").stdout == "shared-name\n"
    assert second.exec("cat", "/etc/hostname").stdout == "shared-name\n"
    assert pod.ip in first.exec("ip", "-o", "addr").stdout
    assert first.exec("sh", "-c", "echo mine > /dev/shm/word").code == 0
    assert second.exec("cat", "/dev/shm/word").stdout == "mine\n"
    assert first.exec("test", "-s", "/etc/hosts").code == 0
    assert pod.is_ready
    assert before <= pod.status.created_at <= time.time_ns()
    os.kill(first.pid, signal.SIGKILL)
    assert first.exit_code() == 137
    assert (second.state, pod.is_ready) == ("RUNNING", True)
    assert pod.run("sh", "-c", "exit 4").status.exit_code == 4
    shims, holder = pod.shims, _holder(pod)
    pod.stop()
    assert _is_over(pod)
    assert not is_alive(holder)
    pod.remove()
    eventually(lambda: not any(is_alive(shim) for shim in shims), "the shims have exited")


def test_processes_are_shared_when_asked_for(pods: Pods) -> None:
    pod = pods.run(namespaces=pb.NamespaceOption(pid=pb.POD))
    first, second = pod.start("sleep", "1001"), pod.start("sleep", "1002")
    eventually(lambda: "sleep 1001" in second.exec("ps", "-o", "args").stdout, "it is there")
    assert re.search(r"^ *1 sandbox", second.exec("ps", "-o", "pid,comm").stdout, re.MULTILINE)
    first.stop()
    assert second.state == "RUNNING"
    eventually(lambda: "sleep 1002" in second.exec("ps", "-o", "args").stdout, "so is the other")


def test_the_hosts_processes_are_shared_only_when_asked_for(pods: Pods) -> None:
    pod = pods.run(namespaces=pb.NamespaceOption(pid=pb.NODE))
    assert _namespace(pod.start(*IDLE), "pid") == os.readlink("/proc/self/ns/pid")
    # Containers have separate namespaces. One that asks for the pod's gets the holder's, and not
    # the host's.
    other = pods.run(namespaces=pb.NamespaceOption(pid=pb.CONTAINER))
    security = pb.LinuxContainerSecurityContext(
        namespace_options=pb.NamespaceOption(pid=pb.POD),
        seccomp=pb.SecurityProfile(profile_type=pb.SecurityProfile.Unconfined),
    )
    curious = other.start(*IDLE, security=security)
    assert _namespace(curious, "pid") == os.readlink(f"/proc/{_holder(other)}/ns/pid")
    assert _namespace(curious, "pid") != os.readlink("/proc/self/ns/pid")


def test_sysctls_are_the_pods(pods: Pods) -> None:
    container = pods.run(sysctls={"net.core.somaxconn": "77", "kernel.shmmni": "78"}).start(*IDLE)
    names = ("net.core.somaxconn", "kernel.shmmni", "net.ipv4.ip_unprivileged_port_start")
    assert container.exec("sysctl", "-n", *names).lines == ["77", "78", "0"]


def test_containers_of_a_pod_have_their_gpus(pods: Pods) -> None:
    pod = pods.run()
    seen = set()
    for gpu in Scenario.load("two").gpus:
        env = {CAPABILITIES: "compute,utility"}
        container = pod.start(*IDLE, image=GLIBC, env=env, granted={DEVICES: gpu.uuid})
        done = container.exec("nvidia-smi", "-L")
        assert done.code == 0, done.stdout + done.stderr
        seen |= set(re.findall(r"GPU-[0-9a-f-]+", done.stdout))
    assert len(seen) == 2


def test_pod_goes_on_while_containerd_is_killed(pods: Pods) -> None:
    pod = pods.run()
    idle = pod.start(*IDLE)
    ending = pod.start("sh", "-c", "trap 'exit 17' USR1; echo up; while :; do sleep 0.05; done")
    eventually(lambda: ending.output() == "up\n", "the container has set its trap")
    shims, dying = pod.shims, ending.pid
    pods.containerd.kill()
    os.kill(dying, signal.SIGUSR1)
    eventually(lambda: not is_alive(dying), "it has exited")
    _start_again(pods)
    assert (pod.is_ready, pod.shims) == (True, shims)
    assert idle.exec("echo", "here").stdout == "here\n"
    assert ending.exit_code() == 17
    assert pod.run("sh", "-c", "exit 3").status.exit_code == 3
    os.kill(_holder(pod), signal.SIGKILL)
    eventually(lambda: _is_over(pod), "the CRI reports that the sandbox stopped")
    pod.remove()
    eventually(lambda: not is_alive(shims[0]), "the shim has exited")


def test_nothing_is_left_of_a_pod_whose_shim_was_killed(pods: Pods) -> None:
    pod = pods.run()
    containers = [pod.start(*IDLE) for _ in range(3)]
    pids = [container.pid for container in containers] + [_holder(pod)]
    os.kill(pod.shims[0], signal.SIGKILL)
    eventually(lambda: not any(is_alive(pid) for pid in pids), "the pod's processes exit")
    eventually(lambda: _is_over(pod), "it is known")
    assert {container.exit_code() for container in containers} == {255}
    pod.remove()


def test_nothing_is_left_of_a_pod_that_cannot_be_made(pods: Pods) -> None:
    for sysctls in ({"kernel.panic": "1"}, {"net.no.such": "1"}):
        with pytest.raises(CriError, match=next(iter(sysctls))):
            pods.run(sysctls=sysctls)
    assert pods.ids() == []
