"""Usage of containers, and changed limits: as containerd reports them, and in cgroups."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from api.proto import cgroups_v1_pb2, cgroups_v2_pb2
from shim.cgroup import cgroup, stats
from tests.harness import api
from tests.harness.cgroup import is_v2, read_cgroup
from tests.harness.messages import flat
from tests.harness.runtime import STOCK, Container, Runtime
from tests.harness.waiting import eventually
from tools.containerd import PrivateContainerd

LIMIT = 64 << 20


def _metrics(container: Container) -> Any:
    """Return containerd's metrics of a container; None if its shim refused."""
    answer = api.metrics(container.runtime.containerd, container.name)
    if answer is None:
        return None
    url, value = answer
    module = cgroups_v2_pb2 if is_v2() else cgroups_v1_pb2
    assert url == module.Metrics.DESCRIPTOR.full_name
    metrics = module.Metrics.FromString(value)
    # containerd's own shim lists page sizes in directory order.
    metrics.hugetlb.sort(key=lambda entry: entry.pagesize)
    return metrics


# Fields that containerd's own shim leaves out, in this version or in all.
MORE = {"network", "cgroup_stats", "hugetlb", "blkio", "memory", "cpu", "io"}


def _differences(container: Container) -> dict[str, Any]:
    """Return the values that differ for one cgroup, by path: theirs, ours, theirs again."""
    theirs = flat(_metrics(container))
    found = cgroup.of(container.pid)
    ours = flat(stats.read(found, container_id=container.name, pid=container.pid))
    again = flat(_metrics(container))
    assert len(theirs) > 20
    more = {path.split(".")[1].partition("[")[0] for path in ours.keys() - theirs.keys()}
    assert more <= MORE
    # Values that change even in a frozen container are compared with their bounds.
    return {
        path: (theirs[path], ours.get(path), again.get(path))
        for path in theirs
        if ours.get(path) not in {theirs[path], again.get(path)}
    }


@pytest.fixture
def stock(containerd: PrivateContainerd) -> Iterator[Runtime]:
    """Return containerd's own shim, for comparison."""
    runtime = Runtime(containerd, STOCK)
    yield runtime
    runtime.close()


def test_statistics_are_those_of_containerds_own_shim(stock: Runtime) -> None:
    container = stock.start(
        "sh", "-c",
        "dd if=/dev/zero of=/file bs=64k count=32 2>/dev/null; sync; touch /ready; exec sleep 1000",
        flags=["--memory-limit", str(LIMIT)],
    )  # fmt: skip
    eventually(lambda: container.exec("test", "-e", "/ready").code == 0, "it has worked")
    stock.containerd.ctr("tasks", "pause", container.name)
    seen: list[dict[str, Any]] = []

    def same() -> bool:
        seen.append(_differences(container))
        return not seen[-1]

    try:
        eventually(same, "the same is read of a frozen container")
    except AssertionError:
        assert seen[-1] == {}


def test_no_field_that_containerds_own_shim_sets_is_missing(
    runtime: Runtime, stock: Runtime
) -> None:
    ours, theirs = (
        which.start("sh", "-c", "head -c 100000 /dev/urandom >/file; exec sleep 1000",
                    flags=["--memory-limit", str(LIMIT)])
        for which in (runtime, stock)
    )  # fmt: skip
    for container in (ours, theirs):
        container.wait_for_program("sleep")
    wanted, found = flat(_metrics(theirs)), flat(_metrics(ours))
    # One page more or less is noise.
    steady = [path for path in wanted if path.endswith(("limit", ".pagesize"))]
    assert len(steady) > 3
    assert {path: found.get(path) for path in steady} == {path: wanted[path] for path in steady}
    assert {path for path in wanted if wanted[path] == "present"} <= found.keys()


def test_ctr_prints_the_memory_and_processes_of_a_container(runtime: Runtime) -> None:
    container = runtime.start_idle(flags=["--memory-limit", str(LIMIT)])
    # Processes that the runtime left count until they are reaped.
    eventually(lambda: _metrics(container).pids.current == 1, "its program is alone")
    for form in ("table", "json"):
        text = runtime.containerd.ctr("tasks", "metrics", "--format", form, container.name).stdout
        if form == "json":
            data = json.loads(text)
            assert data["pids"]["current"] == 1
            memory = data["memory"]
            assert (memory["usage_limit"] if is_v2() else memory["usage"]["limit"]) == LIMIT
        else:
            table = dict(line.split()[:2] for line in text.splitlines() if len(line.split()) == 2)
            assert int(table["pids.current"]) == 1
            assert int(table.get("memory.usage_in_bytes") or table["memory.usage"]) > 0
            limit = table.get("memory.limit_in_bytes") or table["memory.usage_limit"]
            assert int(limit) == LIMIT


def test_network_is_the_containers_own_and_never_the_hosts(runtime: Runtime) -> None:
    if not runtime.is_ours:
        pytest.skip("containerd's own shim leaves the network out")
    own = runtime.start(
        "sh", "-c", "ifconfig lo 127.0.0.1 up; ping -c 3 127.0.0.1; exec sleep 1000",
        flags=["--privileged"],
    )  # fmt: skip
    own.wait_for_program("sleep")
    (loopback,) = _metrics(own).network
    assert loopback.name == "lo"
    assert loopback.rx_packets == loopback.tx_packets >= 6
    assert loopback.rx_bytes >= 6 * 84
    hosts = runtime.start_idle(flags=["--net-host"])
    assert list(_metrics(hosts).network) == []


def test_processor_time_is_counted(runtime: Runtime) -> None:
    container = runtime.start("sh", "-c", "while :; do :; done")

    def used() -> int:
        usage = _metrics(container).cpu
        return usage.usage_usec * 1000 if is_v2() else int(usage.usage.total)

    before = eventually(used, "it has used some time")
    eventually(lambda: used() > before + 50_000_000, "it uses more")
    runtime.containerd.ctr("tasks", "pause", container.name)  # the reads are not simultaneous
    metrics = _metrics(container)
    if not is_v2():
        # The kernel counts these in ticks of 10 ms; a wrong unit would be far off.
        usage = metrics.cpu.usage
        assert abs(usage.user + usage.kernel - usage.total) < 200_000_000
        assert sum(usage.per_cpu) == pytest.approx(usage.total, abs=100_000_000)


def test_stopped_container_tells_what_is_left_and_a_deleted_one_nothing(runtime: Runtime) -> None:
    container = runtime.start("sh", "-c", "head -c 1000000 /dev/urandom >/file")
    container.wait_for("STOPPED")
    eventually(lambda: _metrics(container).pids.current == 0, "all of it is reaped")
    metrics = _metrics(container)
    assert (metrics.cpu.usage_usec if is_v2() else metrics.cpu.usage.total) > 0
    container.delete_task()
    assert _metrics(container) is None


# Limits as JSON, the file to check on each cgroup version, and its content then. (The runtime
# decides how shares become a weight: runc changed it in 1.3.)
LIMITS: dict[str, tuple[dict[str, Any], str, str, str, str, str]] = {
    "memory": ({"memory": {"limit": 32 << 20, "swap": 48 << 20}},
        "memory", "memory.limit_in_bytes", str(32 << 20), "memory.max", str(32 << 20)),
    "swap": ({"memory": {"limit": 32 << 20, "swap": 48 << 20}},
        "memory", "memory.memsw.limit_in_bytes", str(48 << 20), "memory.swap.max", str(16 << 20)),
    "reservation": ({"memory": {"reservation": 8 << 20}},
        "memory", "memory.soft_limit_in_bytes", str(8 << 20), "memory.low", str(8 << 20)),
    "shares": ({"cpu": {"shares": 512}}, "cpu", "cpu.shares", "512", "cpu.weight", "20 or 59"),
    "quota": ({"cpu": {"quota": 25000, "period": 50000}},
        "cpu", "cpu.cfs_quota_us", "25000", "cpu.max", "25000 50000"),
    "period": ({"cpu": {"quota": 25000, "period": 50000}},
        "cpu", "cpu.cfs_period_us", "50000", "cpu.max", "25000 50000"),
    "cpus": ({"cpu": {"cpus": "1", "mems": "0"}}, "cpuset", "cpuset.cpus", "1", "cpuset.cpus", "1"),
    "pids": ({"pids": {"limit": 77}}, "pids", "pids.max", "77", "pids.max", "77"),
    "devices are left alone": (
        {"devices": [{"allow": False, "access": "rwm"}], "pids": {"limit": 78}},
        "pids", "pids.max", "78", "pids.max", "78"),
    "nulls are nothing": ({"cpu": None, "memory": {"limit": None}, "pids": {"limit": 79}},
        "pids", "pids.max", "79", "pids.max", "79"),
}  # fmt: skip


def test_limits_are_changed_while_the_container_runs(
    runtime: Runtime,
) -> None:
    container = runtime.start_idle(flags=["--memory-limit", str(LIMIT)])
    pid = container.pid
    devices = None if is_v2() else read_cgroup(pid, "devices", v1="devices.list", v2="")
    for name, (limits, controller, v1, in_v1, v2, in_v2) in LIMITS.items():
        api.update_task(
            runtime.containerd, container.name, json.dumps(limits).encode(),
            annotations={"example.com/why": name},
        )  # fmt: skip
        content = read_cgroup(pid, controller, v1=v1, v2=v2).strip()
        assert content in (in_v2 if is_v2() else in_v1).split(" or "), name
    metrics = _metrics(container)
    limit = metrics.memory.usage_limit if is_v2() else metrics.memory.usage.limit
    assert limit == 32 << 20
    assert metrics.pids.limit == 79
    if devices is not None:
        assert read_cgroup(pid, "devices", v1="devices.list", v2="") == devices
    assert container.exec("sh", "-c", "echo here >/dev/null").code == 0


def test_malformed_limits_are_refused_by_name_and_change_nothing(runtime: Runtime) -> None:
    container = runtime.start_idle(flags=["--memory-limit", str(LIMIT)])
    for limits, blamed in (
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "list"),
        (b'{"cpu": []}', "cpu"),
        (b'{"memory": {"limit": "1G"}}', "memory.limit"),
        (b'{"pids": {"limit": 1e400}}', "pids.limit"),
    ):
        with pytest.raises(api.ApiRefused) as refused:
            api.update_task(runtime.containerd, container.name, limits)
        if runtime.is_ours:
            assert blamed in str(refused.value)
            assert "NVSHIM-E" in str(refused.value)
    assert read_cgroup(container.pid, "memory", v1="memory.limit_in_bytes", v2="memory.max") == (
        f"{LIMIT}\n"
    )


def test_limits_of_a_container_that_has_ended_are_not_changed(runtime: Runtime) -> None:
    container = runtime.start("true")
    container.wait_for("STOPPED")
    with pytest.raises(api.ApiRefused):
        api.update_task(runtime.containerd, container.name, b'{"pids": {"limit": 5}}')
