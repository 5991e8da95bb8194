"""An MPS client in a pod, with the device plugin's answer to the kubelet."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import grpc  # type: ignore[import-untyped] # it ships no types
import pytest

from api.proto import cri_pb2 as pb
from integration.simulated import SimulatedNode
from tests.harness.kubelet_plugins import KubeletPlugins
from tests.harness.mps_agent import RESOURCE, end_daemons, processes
from tests.harness.node_agent import NodeAgent
from tests.harness.pods import IDLE, Pods, host_directory
from tests.harness.waiting import eventually, settled
from tools.images import GLIBC

USER: Final = 1000
MPS_CONNECTION_FAILED: Final = 805  # CUDA's error if the server, which has no GPU, has exited

CLIENT: Final = """
#include <dlfcn.h>
#include <stdio.h>
int main(void)
{
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    int (*init)(unsigned) = cuda ? (int (*)(unsigned))dlsym(cuda, "cuInit") : NULL;
    printf("%d\\n", init ? init(0) : -1);
    return 0;
}
"""


@pytest.fixture
def root(two_gpus: SimulatedNode) -> Iterator[Path]:
    """Yield the MPS root directory on the host; its path is short for socket addresses."""
    top = tempfile.mkdtemp(prefix="mps-")
    root = Path(top, "mps")
    yield root
    end_daemons(root, two_gpus)
    shutil.rmtree(top)


@pytest.fixture
def agent(pods: Pods, two_gpus: SimulatedNode, tmp_path: Path, root: Path) -> Iterator[NodeAgent]:
    """Return an agent that shares each GPU among four with MPS, before the kubelet starts."""
    socket = str(tmp_path / "kubelet/kubelet.sock")
    state = f"{pods.containerd.directory}/state"
    agent = NodeAgent(two_gpus, str(tmp_path), socket, "--containerd-state", state)
    agent.configure(
        flags={"plugin": {"deviceListStrategy": ["envvar"]}, "mpsRoot": str(root)},
        sharing={"mps": {"resources": [{"name": RESOURCE, "replicas": 4}]}},
    )
    with agent:
        yield agent


def test_a_container_is_a_client_of_the_daemon_with_the_driver_that_was_injected(
    pods: Pods, agent: NodeAgent, root: Path, configure: Callable[..., None], tmp_path: Path
) -> None:
    if not pods.is_ours:
        pytest.skip("containerd's own shim knows nothing of GPUs")
    configure(node=agent.node)
    programs = tmp_path / "programs"
    programs.mkdir()
    cc = shutil.which("cc") or pytest.fail("no C compiler")
    subprocess.run([cc, "-xc", "-", "-o", programs / "client"], input=CLIENT, text=True, check=True)
    with KubeletPlugins(str(tmp_path / "kubelet")) as kubelet:
        # Devices become healthy only when their daemon is serving.
        kubelet.wait_for(RESOURCE, 8)
        # A child of the daemon looks like the daemon until it executes its program.
        eventually(lambda: len(processes(root)) == 1, "one daemon runs, and nothing else")
        (daemon,) = processes(root)
        with pytest.raises(grpc.RpcError, match="NVSHIM-E"):  # one share each, by default
            kubelet.allocate(RESOURCE, 2, pod="greedy")
        answer = kubelet.allocate(RESOURCE, 1, pod="one")
    uuids = [gpu.uuid for gpu in agent.node.scenario.gpus]
    number = uuids.index(answer.envs["NVIDIA_VISIBLE_DEVICES"])
    security = pb.LinuxContainerSecurityContext(
        namespace_options=pb.NamespaceOption(pid=pb.CONTAINER),
        run_as_user=pb.Int64Value(value=USER),
        capabilities=pb.Capability(drop_capabilities=["ALL"]),
    )
    pod = pods.run()
    container = pod.start(
        *IDLE,
        image=GLIBC,
        granted=answer,
        env={"NVIDIA_DRIVER_CAPABILITIES": "compute,utility"},
        mounts=[host_directory(str(programs), "/programs", readonly=True)],
        security=security,
    )

    def run(*command: str) -> str:
        done = container.exec(*command)
        return done.stdout + done.stderr

    # The kubelet's mounts and variables are still there, next to its one GPU.
    assert "CUDA_MPS_PIPE_DIRECTORY=/mps/nvidia.com/gpu/pipe" in run("env").splitlines()
    assert run("sh", "-c", "echo /dev/nvidia[0-9]*") == f"/dev/nvidia{number}\n"
    with open(f"/proc/{container.pid}/mountinfo", encoding="utf-8") as file:
        mounted = {words[4]: words for words in map(str.split, file)}
    assert mounted["/mps/nvidia.com/gpu/pipe"][5].startswith("ro,")
    assert mounted["/dev/shm"][5].startswith("rw,")
    shm = os.stat(f"/proc/{container.pid}/root/dev/shm")
    assert shm.st_dev == os.stat(f"/proc/{daemon}/root/dev/shm").st_dev
    # A client can write there and nowhere else.
    assert run("sh", "-c", "echo ours >/dev/shm/sem.client && cat /dev/shm/sem.client") == "ours\n"
    assert "ead-only file system" in run("sh", "-c", "echo >/mps/nvidia.com/gpu/pipe/control_lock")

    # The driver's own libcuda finds the daemon, which starts a server for the container's user.
    assert run("/programs/client") == f"{MPS_CONNECTION_FAILED}\n"
    log = root / RESOURCE / "log/control.log"
    eventually(lambda: f"for user {USER}" in log.read_text(), "a client of that user")

    # The agent stops. The daemon stays, because the container may use it later.
    assert agent.stop() == 0
    assert settled(lambda: processes(root), [daemon]) == [daemon]
    assert run("sh", "-c", "echo get_server_list | nvidia-cuda-mps-control && echo yes") == "yes\n"
