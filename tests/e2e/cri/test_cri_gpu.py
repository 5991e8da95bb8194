"""Pods with a simulated node's GPUs, requested as the kubelet requests them."""

from __future__ import annotations

import os
import re
from typing import Final

import pytest

from api.proto import cri_pb2 as pb
from integration.cri.errors import CriRefused
from integration.simulated import SimulatedNode
from tests.harness.pods import IDLE, Pods
from tools.images import GLIBC

DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
CAPABILITIES: Final = "NVIDIA_DRIVER_CAPABILITIES"
LISTED: Final = re.compile(r"\(UUID: (GPU-[0-9a-f-]+)\)")


def test_containers_of_a_pod_have_different_gpus(gpus: Pods, two_gpus: SimulatedNode) -> None:
    pod = gpus.run()
    seen = []
    for number in range(2):
        granted = {DEVICES: two_gpus.scenario.gpus[number].uuid}
        env = {CAPABILITIES: "compute,utility"}
        container = pod.start(*IDLE, image=GLIBC, env=env, granted=granted)
        done = container.exec("nvidia-smi", "-L")
        assert done.code == 0, done.stdout + done.stderr
        seen += LISTED.findall(done.stdout)
        nodes = container.exec("sh", "-c", "echo /dev/nvidia[0-9]*").stdout
        assert nodes == f"/dev/nvidia{number}\n"
    assert len(set(seen)) == 2
    without = pod.start(*IDLE, image=GLIBC)
    assert without.exec("sh", "-c", "echo /dev/nvidia*").stdout == "/dev/nvidia*\n"
    # The pod's pause container requests nothing and gets nothing.
    assert len(pod.shims) == 1


def test_exec_loads_the_driver_as_an_unprivileged_user_of_a_readonly_root(
    gpus: Pods, two_gpus: SimulatedNode
) -> None:
    pod = gpus.run()
    security = pb.LinuxContainerSecurityContext(
        namespace_options=pb.NamespaceOption(pid=pb.CONTAINER),
        seccomp=pb.SecurityProfile(profile_type=pb.SecurityProfile.RuntimeDefault),
        run_as_user=pb.Int64Value(value=1000),
        supplemental_groups=[4000],
        readonly_rootfs=True,
        no_new_privs=True,
        capabilities=pb.Capability(drop_capabilities=["ALL"]),
    )
    uuids = ",".join(gpu.uuid for gpu in two_gpus.scenario.gpus)
    env, granted = {CAPABILITIES: "compute,utility"}, {DEVICES: uuids}
    container = pod.start(*IDLE, image=GLIBC, env=env, granted=granted, security=security)
    executed = container.exec("probe", "dlopen", "libcuda.so.1", "libnvidia-ml.so.1")
    assert executed.code == 0, executed.stdout + executed.stderr
    done = container.exec("nvidia-smi", "-L")
    assert len(LISTED.findall(done.stdout)) == 2, done.stdout + done.stderr
    # An exec has the same groups as the container's own process.
    groups = container.exec("id", "-G").stdout.split()
    with open(f"/proc/{container.pid}/status") as file:
        own = next(line for line in file if line.startswith("Groups:")).split()[1:]
    assert set(own) <= set(groups)
    assert "4000" in own
    with open(f"/proc/{container.pid}/environ") as file:
        variables = {word for word in file.read().split("\0") if word.startswith("NVIDIA")}
    assert variables <= set(container.exec("env").lines)


def test_gpu_that_is_not_there_is_one_line_that_says_what_there_is(
    gpus: Pods, two_gpus: SimulatedNode
) -> None:
    pod = gpus.run()
    absent = "GPU-00000000-0000-4000-8000-000000000000"
    container = pod.create("true", image=GLIBC, granted={DEVICES: absent})
    with pytest.raises(CriRefused, match="NVSHIM-E0") as refused:
        container.start()
    assert "\n" not in refused.value.said
    assert "Traceback" not in refused.value.said
    status = container.status
    assert (status.reason, status.exit_code) == ("StartError", 128)
    assert "NVSHIM-E0" in status.message
    container.remove()
    granted = {DEVICES: two_gpus.scenario.gpus[1].uuid}
    env = {CAPABILITIES: "utility"}
    good = pod.run("nvidia-smi", "-L", image=GLIBC, env=env, granted=granted)
    assert good.status.exit_code == 0
    pod.remove()
    assert gpus.ids() == []


def test_privileged_container_with_all_gpus(gpus: Pods, two_gpus: SimulatedNode) -> None:
    security = pb.LinuxSandboxSecurityContext(privileged=True)
    pod = gpus.run(security=security)
    mine = pb.LinuxContainerSecurityContext(privileged=True)
    env = {DEVICES: "all", CAPABILITIES: "all"}
    container = pod.start(*IDLE, image=GLIBC, env=env, security=mine)
    assert len(LISTED.findall(container.exec("nvidia-smi", "-L").stdout)) == 2
    assert os.path.exists(f"{two_gpus.dev}/nvidia0")
