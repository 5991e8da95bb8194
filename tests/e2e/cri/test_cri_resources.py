"""Statistics, limits and out-of-memory kills, as the kubelet sees them."""

from __future__ import annotations

from typing import Final

import pytest

from api.proto import cri_pb2 as pb
from integration.cri.errors import CriRefused
from tests.harness.cgroup import read_cgroup
from tests.harness.pods import IDLE, PodContainer, Pods
from tests.harness.waiting import eventually

MIB: Final = 1 << 20


def test_statistics_of_containers_and_pods_are_what_the_kernel_counts(pods: Pods) -> None:
    pod = pods.run()
    busy = pod.start("sh", "-c", "while :; do :; done")
    idle = pod.start(*IDLE)
    stats = _stats(pods, busy)
    assert stats.attributes.metadata.name == busy.status.metadata.name
    used = stats.cpu.usage_core_nano_seconds.value
    eventually(lambda: _used(pods, busy) > used + 50_000_000, "processor time grows")
    counted = int(read_cgroup(busy.pid, "cpuacct", v1="cpuacct.usage", v2="cpu.stat").split()[0])
    assert used < counted
    assert 0 < _stats(pods, idle).memory.working_set_bytes.value < 50 * MIB
    listed = pods.cri.list_container_stats(
        pb.ListContainerStatsRequest(filter=pb.ContainerStatsFilter(pod_sandbox_id=pod.id))
    ).stats
    assert {s.attributes.id for s in listed} == {busy.id, idle.id}
    whole = pods.cri.pod_sandbox_stats(pb.PodSandboxStatsRequest(pod_sandbox_id=pod.id)).stats
    assert whole.linux.cpu.usage_core_nano_seconds.value >= used
    assert {s.attributes.id for s in whole.linux.containers} == {busy.id, idle.id}
    assert whole.linux.process.process_count.value >= 2
    busy.stop()
    listed = pods.cri.list_container_stats(
        pb.ListContainerStatsRequest(filter=pb.ContainerStatsFilter(pod_sandbox_id=pod.id))
    ).stats
    assert idle.id in {s.attributes.id for s in listed}


def test_limits_hold_and_can_be_changed_while_it_runs(pods: Pods) -> None:
    limits = pb.LinuxContainerResources(
        memory_limit_in_bytes=64 * MIB, cpu_shares=512, cpu_quota=50000, cpu_period=100000
    )
    container = pods.run().start(*IDLE, resources=limits)
    assert _limit(container) == 64 * MIB
    changed = pb.LinuxContainerResources(memory_limit_in_bytes=96 * MIB, cpu_shares=256)
    pods.cri.update_container_resources(
        pb.UpdateContainerResourcesRequest(container_id=container.id, linux=changed)
    )
    assert _limit(container) == 96 * MIB
    assert read_cgroup(container.pid, "cpu", v1="cpu.shares", v2="cpu.weight").strip() in {
        "256",
        "10",
    }
    # Other limits are unchanged.
    assert "50000" in read_cgroup(container.pid, "cpu", v1="cpu.cfs_quota_us", v2="cpu.max")
    with pytest.raises(CriRefused) as refused:
        pods.cri.update_container_resources(
            pb.UpdateContainerResourcesRequest(
                container_id=container.id, linux=pb.LinuxContainerResources(cpuset_cpus="9999")
            )
        )
    assert not pods.is_ours or "\n" not in refused.value.said
    assert container.exec("true").code == 0


def test_container_that_takes_too_much_memory_is_said_to_be_oom_killed(pods: Pods) -> None:
    pod = pods.run()
    limits = pb.LinuxContainerResources(memory_limit_in_bytes=32 * MIB)
    greedy = pod.start("tail", "/dev/zero", resources=limits)
    modest = pod.start(*IDLE, resources=limits)
    assert greedy.exit_code() == 137
    eventually(lambda: greedy.status.reason == "OOMKilled", "the reason")
    assert modest.state == "RUNNING"
    modest.stop()
    assert modest.status.reason == "Error"


def _stats(pods: Pods, container: PodContainer) -> pb.ContainerStats:
    return pods.cri.container_stats(pb.ContainerStatsRequest(container_id=container.id)).stats


def _used(pods: Pods, container: PodContainer) -> int:
    return _stats(pods, container).cpu.usage_core_nano_seconds.value


def _limit(container: PodContainer) -> int:
    return int(read_cgroup(container.pid, "memory", v1="memory.limit_in_bytes", v2="memory.max"))
