"""Statistics from cgroup files of real kernels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from google.protobuf import text_format

from api.proto import cgroups_v1_pb2 as v1
from api.proto import cgroups_v2_pb2 as v2
from shim.cgroup import stats
from shim.cgroup.cgroup import UNIFIED, Cgroup
from shim.errors import CgroupNotFound
from tests.harness.messages import flat
from tests.harness.raising import raises

MOST = 2**64 - 1
UNLIMITED = 9223372036854771712  # v1's value for "max"

MEMORY_STAT_V1 = """\
cache 3145728
rss 57344
rss_huge 0
shmem 0
mapped_file 12
dirty 13
writeback 14
pgpgin 679
pgpgout 662
pgfault 1019
pgmajfault 5
inactive_anon 53248
active_anon 4096
inactive_file 3145728
active_file 6
unevictable 7
hierarchical_memory_limit 67108864
hierarchical_memsw_limit 134217728
total_cache 13145728
total_rss 157344
total_pgpgin 1679
total_pgmajfault 15
total_unevictable 17
"""

V1 = {
    "cpu/cpu.stat": "nr_periods 10\nnr_throttled 4\nthrottled_time 70500000\n",
    "cpuacct/cpuacct.usage": "12826083\n",
    "cpuacct/cpuacct.usage_percpu": "9329473 3496610 \n",
    "cpuacct/cpuacct.stat": "user 25\nsystem 3\n",
    "memory/memory.stat": MEMORY_STAT_V1,
    "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 1\noom_kill 3\n",
    "memory/memory.usage_in_bytes": "3653632\n",
    "memory/memory.max_usage_in_bytes": "5029888\n",
    "memory/memory.failcnt": "8\n",
    "memory/memory.limit_in_bytes": "67108864\n",
    "memory/memory.kmem.usage_in_bytes": "335872\n",
    "memory/memory.kmem.limit_in_bytes": f"{UNLIMITED}\n",
    "memory/memory.kmem.tcp.failcnt": "2\n",
    "pids/pids.current": "2\n",
    "pids/pids.max": "max\n",
    "blkio/blkio.throttle.io_serviced": "8:0 Read 1\n8:0 Write 2\n8:0 Total 3\nTotal 3\n",
    "blkio/blkio.throttle.io_service_bytes": "8:0 Read 4096\n7:9 Total 5\nTotal 4101\n",
    "blkio/blkio.bfq.io_queued_recursive": "Total 0\n",
    "blkio/blkio.bfq.sectors_recursive": "8:0 77\n",
    "hugetlb/hugetlb.2MB.usage_in_bytes": "2097152\n",
    "hugetlb/hugetlb.2MB.max_usage_in_bytes": "4194304\n",
    "hugetlb/hugetlb.2MB.failcnt": "1\n",
    "hugetlb/hugetlb.2MB.rsvd.usage_in_bytes": "9\n",
    "rdma/rdma.current": "mlx4_0 hca_handle=1 hca_object=2\n",
    "rdma/rdma.max": "mlx4_0 hca_handle=max hca_object=20\n",
}
FROM_V1 = f"""
hugetlb {{ usage: 2097152 max: 4194304 failcnt: 1 pagesize: "2MB" }}
pids {{ current: 2 limit: 0 }}
cpu {{
  usage {{ total: 12826083 kernel: 30000000 user: 250000000 per_cpu: 9329473 per_cpu: 3496610 }}
  throttling {{ periods: 10 throttled_periods: 4 throttled_time: 70500000 }}
}}
memory {{
  cache: 3145728 rss: 57344 mapped_file: 12 dirty: 13 writeback: 14 pg_pg_in: 679 pg_pg_out: 662
  pg_fault: 1019 pg_maj_fault: 5 inactive_anon: 53248 active_anon: 4096 inactive_file: 3145728
  active_file: 6 unevictable: 7 hierarchical_memory_limit: 67108864
  hierarchical_swap_limit: 134217728 total_cache: 13145728 total_rss: 157344
  total_pg_pg_in: 1679 total_pg_maj_fault: 15 total_unevictable: 17
  usage {{ limit: 67108864 usage: 3653632 max: 5029888 failcnt: 8 }}
  swap {{ }}
  kernel {{ limit: {UNLIMITED} usage: 335872 }}
  kernel_tcp {{ failcnt: 2 }}
}}
blkio {{
  io_service_bytes_recursive {{ op: "Read" device: "/dev/sda" major: 8 value: 4096 }}
  io_service_bytes_recursive {{ op: "Total" major: 7 minor: 9 value: 5 }}
  io_serviced_recursive {{ op: "Read" device: "/dev/sda" major: 8 value: 1 }}
  io_serviced_recursive {{ op: "Write" device: "/dev/sda" major: 8 value: 2 }}
  io_serviced_recursive {{ op: "Total" device: "/dev/sda" major: 8 value: 3 }}
  sectors_recursive {{ device: "/dev/sda" major: 8 value: 77 }}
}}
rdma {{
  current {{ device: "mlx4_0" hca_handles: 1 hca_objects: 2 }}
  limit {{ device: "mlx4_0" hca_handles: {2**32 - 1} hca_objects: 20 }}
}}
memory_oom_control {{ under_oom: 1 oom_kill: 3 }}
"""

V2 = {
    "cgroup.controllers": "cpuset cpu io memory hugetlb pids rdma\n",
    "cpu.stat": (
        "usage_usec 6000\nuser_usec 4000\nsystem_usec 2000\nnice_usec 1\nnr_periods 9\n"
        "nr_throttled 3\nthrottled_usec 700\nnr_bursts 2\nburst_usec 30\n"
    ),
    "cpu.pressure": "some avg10=0.12 avg60=1.50 avg300=100.00 total=1234\n",
    "memory.stat": (
        "anon 1\nfile 2\nkernel 9999\nkernel_stack 3\nslab 4\npgfault 18\n"
        "workingset_refault_anon 39\nworkingset_refault_file 40\n"
        "workingset_activate_anon 41\nworkingset_activate_file 42\n"
        "thp_collapse_alloc 31\nusage 77\n"
    ),
    "memory.current": "4096\n",
    "memory.max": "max\n",
    "memory.peak": "8192\n",
    "memory.swap.current": "0\n",
    "memory.swap.max": "1048576\n",
    "memory.swap.peak": "5\n",
    "memory.pressure": (
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"
        "full avg10=0.50 avg60=0.00 avg300=0.00 total=6\n"
    ),
    "memory.events": "low 1\nhigh 2\nmax 3\noom 4\noom_kill 5\noom_group_kill 6\n",
    "io.stat": "8:0 rbytes=10 wbytes=20 rios=1 wios=2 dbytes=0 dios=0\n253:1 \n8:x rbytes=1\n",
    "pids.current": "2\n",
    "pids.max": "max\n",
    "rdma.current": "mlx4_0 hca_handle=1 hca_object=2\n",
    "rdma.max": "mlx4_0 hca_handle=max hca_object=20\n",
    "hugetlb.1GB.current": "1073741824\n",
    "hugetlb.1GB.max": "max\n",
    "hugetlb.1GB.events": "max 4\n",
    "hugetlb.1GB.rsvd.current": "9\n",
}
FROM_V2 = f"""
pids {{ current: 2 limit: {MOST} }}
cpu {{
  usage_usec: 6000 user_usec: 4000 system_usec: 2000 nr_periods: 9 nr_throttled: 3
  throttled_usec: 700 nr_bursts: 2 burst_usec: 30
  psi {{ some {{ avg10: 0.12 avg60: 1.5 avg300: 100 total: 1234 }} }}
}}
memory {{
  anon: 1 file: 2 kernel_stack: 3 slab: 4 pgfault: 18 thp_collapse_alloc: 31
  workingset_refault_anon: 39 workingset_refault_file: 40
  workingset_activate_anon: 41 workingset_activate_file: 42
  usage: 4096 usage_limit: {MOST} swap_usage: 0 swap_limit: 1048576 max_usage: 8192
  swap_max_usage: 5
  psi {{ some {{ total: 7 }} full {{ avg10: 0.5 total: 6 }} }}
}}
rdma {{
  current {{ device: "mlx4_0" hca_handles: 1 hca_objects: 2 }}
  limit {{ device: "mlx4_0" hca_handles: {2**32 - 1} hca_objects: 20 }}
}}
io {{ usage {{ major: 8 rbytes: 10 wbytes: 20 rios: 1 wios: 2 }} }}
hugetlb {{ current: 1073741824 max: {MOST} pagesize: "1GB" failcnt: 4 }}
memory_events {{ low: 1 high: 2 max: 3 oom: 4 oom_kill: 5 oom_group_kill: 6 }}
"""


def _tree(root: Path, files: dict[str, str]) -> dict[str, str]:
    """Write files; return the top-level directories by name."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return {path.name: str(path) for path in root.iterdir() if path.is_dir()}


def _read_v1(root: Path, files: dict[str, str]) -> v1.Metrics:
    return stats.metrics_v1(_tree(root, files), {(8, 0): "/dev/sda"}, ticks=100)


def test_everything_of_version_1_is_read(tmp_path: Path) -> None:
    assert _read_v1(tmp_path, V1) == text_format.Parse(FROM_V1, v1.Metrics())


def test_everything_of_version_2_is_read(tmp_path: Path) -> None:
    _tree(tmp_path, V2)
    assert stats.metrics_v2(str(tmp_path)) == text_format.Parse(FROM_V2, v2.Metrics())


@pytest.mark.parametrize("missing", V1)
def test_a_file_that_version_1_does_not_offer_takes_no_other_field_with_it(
    tmp_path: Path, missing: str
) -> None:
    whole = flat(_read_v1(tmp_path / "whole", V1))
    part = flat(_read_v1(tmp_path / "part", {k: v for k, v in V1.items() if k != missing}))
    assert part.items() <= whole.items()
    lost = {path.split(".")[1].partition("[")[0] for path in whole.keys() - part.keys()}
    controller, _, name = missing.partition("/")
    assert lost <= {controller.removesuffix("acct"), name.replace(".", "_")}


@pytest.mark.parametrize("missing", V2)
def test_a_file_that_version_2_does_not_offer_takes_no_other_field_with_it(
    tmp_path: Path, missing: str
) -> None:
    _tree(tmp_path, V2)
    whole = flat(stats.metrics_v2(str(tmp_path)))
    (tmp_path / missing).unlink()
    part = flat(stats.metrics_v2(str(tmp_path)))
    assert part.items() <= whole.items()
    lost = {path.split(".")[1].partition("[")[0] for path in whole.keys() - part.keys()}
    assert lost <= {missing.partition(".")[0], missing.replace(".", "_")}


@pytest.mark.parametrize(
    "content", ["", "garbage", "\xff\x00", "-1", "max", "1 2 3 4 5\n", "9" * 99]
)
def test_garbage_in_any_file_is_no_error(tmp_path: Path, content: str) -> None:
    metrics = _read_v1(tmp_path / "v1", dict.fromkeys(V1, content))
    assert metrics.SerializeToString()
    _tree(tmp_path / "v2", dict.fromkeys(V2, content))
    assert stats.metrics_v2(str(tmp_path / "v2")).SerializeToString()


def test_controllers_that_the_container_is_not_in_are_left_out(tmp_path: Path) -> None:
    metrics = _read_v1(tmp_path, {k: v for k, v in V1.items() if k.startswith("pids/")})
    assert [field.name for field, _ in metrics.ListFields()] == ["pids", "cpu"]
    assert metrics.cpu.HasField("usage")
    assert metrics.cpu.HasField("throttling")


def test_parts_of_version_2_are_there_also_without_their_controllers(tmp_path: Path) -> None:
    _tree(tmp_path, {"cpu.stat": "usage_usec 5\n"})
    metrics = stats.metrics_v2(str(tmp_path))
    assert [field.name for field, _ in metrics.ListFields()] == [
        "pids", "cpu", "memory", "rdma", "io",
    ]  # fmt: skip
    assert metrics.cpu.usage_usec == 5
    assert not metrics.cpu.HasField("psi")


CFQ = {f"blkio/blkio.{name}": "8:0 Read 1\nTotal 1\n" for name in (
    "io_service_bytes_recursive", "io_serviced_recursive", "io_queued_recursive",
    "io_service_time_recursive", "io_wait_time_recursive", "io_merged_recursive",
)}  # fmt: skip
CFQ |= {"blkio/blkio.time_recursive": "8:0 1\n", "blkio/blkio.sectors_recursive": "8:0 1\n"}


def test_a_scheduler_that_counts_everything_is_asked_first(tmp_path: Path) -> None:
    throttle = {"blkio/blkio.throttle.io_serviced": "8:0 Read 9\n"}
    blkio = _read_v1(tmp_path, {**CFQ, **throttle}).blkio
    for field in v1.BlkIOStat.DESCRIPTOR.fields:
        (entry,) = getattr(blkio, field.name)
        assert (entry.major, entry.minor, entry.value) == (8, 0, 1)


def test_a_scheduler_that_is_not_used_gives_way_to_the_throttling_layer(tmp_path: Path) -> None:
    unused = dict.fromkeys(CFQ, "Total 0\n")
    throttle = {
        "blkio/blkio.throttle.io_serviced": "8:0 Read 9\n",
        "blkio/blkio.throttle.io_serviced_recursive": "8:0 Read 10\n",
    }
    (entry,) = _read_v1(tmp_path, {**unused, **throttle}).blkio.io_serviced_recursive
    assert entry.value == 10


def test_block_devices_have_the_name_of_their_first_line() -> None:
    text = (
        "major minor  #blocks  name\n\n   8        0   10485760 sda\n   8        1    1 sda1\n"
        "   8        0   10485760 again\n 259 0 5 nvme0n1\nx y z w\n"
    )
    assert stats.block_devices(text) == {
        (8, 0): "/dev/sda", (8, 1): "/dev/sda1", (259, 0): "/dev/nvme0n1",
    }  # fmt: skip


NET_DEV = """\
Inter-|   Receive                  |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo
    lo:     504       6    0    0    0     0          0         0      505       7    0    0 0 0 0 0
eth0.7:18446744073709551615 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16
 short: 1 2 3
   bad: 1 2 3 4 5 6 7 8 9 x 11 12 13 14 15 16
"""


def test_interfaces_are_read_with_their_counters() -> None:
    assert stats.parse_interfaces(NET_DEV) == {
        "lo": _counters(504, 6, 0, 0, 505, 7, 0, 0),
        "eth0.7": _counters(MOST, 2, 3, 4, 9, 10, 11, 12),
    }


def _counters(*values: int) -> dict[str, int]:
    names = (
        "rx_bytes", "rx_packets", "rx_errors", "rx_dropped",
        "tx_bytes", "tx_packets", "tx_errors", "tx_dropped",
    )  # fmt: skip
    return dict(zip(names, values, strict=True))


def test_our_own_network_is_no_containers() -> None:
    assert stats.interfaces_of(os.getpid()) == {}
    assert stats.interfaces_of(2**22 + 1) == {}


def test_a_container_without_cgroup_or_whose_cgroup_is_gone_is_not_found(tmp_path: Path) -> None:
    gone = Cgroup({"pids": str(tmp_path / "gone"), UNIFIED: str(tmp_path)}, is_v2=False)
    gone_v2 = Cgroup({UNIFIED: str(tmp_path / "gone"), "name=x": str(tmp_path)}, is_v2=True)
    for cgroup in (None, gone, gone_v2):
        with raises(CgroupNotFound, match="statistics of c1"):
            stats.read(cgroup, container_id="c1", pid=0)


def test_the_message_is_of_the_version_that_has_the_controllers(tmp_path: Path) -> None:
    _tree(tmp_path, V2)
    directories = {**_tree(tmp_path, V1), UNIFIED: str(tmp_path)}
    read = stats.read(Cgroup(directories, is_v2=False), container_id="c1", pid=0)
    assert isinstance(read, v1.Metrics)
    assert read.pids.current == 2
    read = stats.read(Cgroup(directories, is_v2=True), container_id="c1", pid=0)
    assert isinstance(read, v2.Metrics)
    assert read.memory.usage == 4096
