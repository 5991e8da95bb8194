"""What a container gets as a client of MPS."""

from __future__ import annotations

import pytest

from api.proto import deviceplugin_pb2 as pb
from integration.agent_errors import MpsNotReady
from integration.node.mps import clients as containers
from integration.node.values.resources import MPS, Device, Resource, Settings

GPU = "GPU-14b5d60e-717f-5926-8c10-bfa432a3c8f1"
OTHER = "GPU-414dcd81-ed67-5847-8bd5-b8812b045111"
SHARED = Resource(
    "nvidia.com/gpu.shared",
    tuple(Device(f"{GPU}::{n}", GPU, GPU, "0", 0) for n in range(2)),
    sharing=MPS,
    replicas=2,
)


def test_a_client_gets_the_pipes_of_its_resource_and_the_memory_of_all() -> None:
    answer = pb.ContainerAllocateResponse()
    containers.add_client(answer, Settings(mps_root="/run/other"), SHARED)
    assert answer.envs == {"CUDA_MPS_PIPE_DIRECTORY": "/mps/nvidia.com/gpu.shared/pipe"}
    assert [(each.container_path, each.host_path, each.read_only) for each in answer.mounts] == [
        ("/mps/nvidia.com/gpu.shared/pipe", "/run/other/nvidia.com/gpu.shared/pipe", True),
        ("/dev/shm", "/run/other/shm", False),
    ]


@pytest.mark.parametrize(
    ("daemon", "reason"),
    [
        (None, "has not started yet"),
        (containers.MpsDaemon(SHARED.name, (GPU,), unready="it ended with status 1"), "it ended"),
        (containers.MpsDaemon(SHARED.name, (OTHER,)), f"does not serve {GPU} yet"),
    ],
)
def test_a_container_gets_nothing_of_a_daemon_that_does_not_serve_it(
    daemon: containers.MpsDaemon | None, reason: str
) -> None:
    daemons = {} if daemon is None else {SHARED.name: daemon}
    assert reason in containers.unready(SHARED.name, [GPU], daemons)
    with pytest.raises(MpsNotReady, match=r"NVSHIM-E2735.*GPU-14b5") as refused:
        containers.refuse_unready(SHARED.name, [GPU], daemons)
    assert "\n" not in str(refused.value)


def test_a_daemon_that_serves_refuses_nobody() -> None:
    daemons = {SHARED.name: containers.MpsDaemon(SHARED.name, (OTHER, GPU), pid=7)}
    assert not containers.unready(SHARED.name, [GPU], daemons)
    containers.refuse_unready(SHARED.name, [GPU], daemons)
