"""What a container has used, from the files of cgroup version 1.

Rules
- Each controller has a directory of its own. One that the container has no cgroup in is left
  out, but for cpu, which whoever reads the message expects.
- A file that the kernel does not offer leaves its field at zero, and those after it unharmed.
- ``max`` is zero, as in every answer of containerd's own shim on version 1.
- Times are nanoseconds: only cpuacct.stat has to be converted, from ticks of the clock.
- Block I/O: the names without a scheduler's are those of CFQ, gone since Linux 5.0. In their
  place stand what all schedulers share, the throttling layer's, for bytes and operations, and
  BFQ's, where it is used, for the rest. Where the kernel adds up the cgroups below, the sum is
  taken; that is what the fields' names say.

Source: containerd/cgroups cgroup1/stats/metrics.proto; kernel Documentation/admin-guide/cgroup-v1
(memory.rst, cpuacct.rst, blkio-controller.rst, hugetlb.rst, pids.rst, rdma.rst).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from api.proto import cgroups_v1_pb2 as v1
from shim import statfiles

if TYPE_CHECKING:
    from collections.abc import Mapping

_NANOSECONDS: Final = 1_000_000_000

# Field of MemoryStat ← key in memory.stat, where they are not the same; each also as total_….
_MEMORY_KEYS: Final = {
    "pg_pg_in": "pgpgin",
    "pg_pg_out": "pgpgout",
    "pg_fault": "pgfault",
    "pg_maj_fault": "pgmajfault",
    "hierarchical_swap_limit": "hierarchical_memsw_limit",
}
_TOTAL: Final = "total_"

# Field of MemoryStat ← what its four files begin with.
_MEMORY_ENTRIES: Final = {
    "usage": "memory",
    "swap": "memory.memsw",
    "kernel": "memory.kmem",
    "kernel_tcp": "memory.kmem.tcp",
}
_MEMORY_ENTRY: Final = {
    "limit": "limit_in_bytes",
    "usage": "usage_in_bytes",
    "max": "max_usage_in_bytes",
    "failcnt": "failcnt",
}

# Field of BlkIOStat ← files, the first that has entries.
_BLKIO: Final = {
    "io_service_bytes_recursive": (
        "io_service_bytes_recursive",
        "throttle.io_service_bytes_recursive",
        "throttle.io_service_bytes",
    ),
    "io_serviced_recursive": (
        "io_serviced_recursive",
        "throttle.io_serviced_recursive",
        "throttle.io_serviced",
    ),
    "io_queued_recursive": ("io_queued_recursive", "bfq.io_queued_recursive"),
    "io_service_time_recursive": ("io_service_time_recursive", "bfq.io_service_time_recursive"),
    "io_wait_time_recursive": ("io_wait_time_recursive", "bfq.io_wait_time_recursive"),
    "io_merged_recursive": ("io_merged_recursive", "bfq.io_merged_recursive"),
    "io_time_recursive": ("time_recursive", "bfq.time_recursive"),
    "sectors_recursive": ("sectors_recursive", "bfq.sectors_recursive"),
}


def metrics(
    directories: Mapping[str, str], devices: Mapping[tuple[int, int], str], *, ticks: int
) -> v1.Metrics:
    """Read everything that the kernel offers.

    Args:
        directories: the container's directory in each controller's hierarchy.
        devices: the paths of block devices, by major and minor number.
        ticks: of the clock per second (``sysconf(_SC_CLK_TCK)``).

    Returns:
        The message, with what could be read.
    """
    result = v1.Metrics(cpu=v1.CPUStat(usage=v1.CPUUsage(), throttling=v1.Throttle()))
    if "cpu" in directories:
        _read_throttling(directories["cpu"], result.cpu.throttling)
    if "cpuacct" in directories:
        _read_cpu_usage(directories["cpuacct"], result.cpu.usage, ticks)
    if "memory" in directories:
        _read_memory(directories["memory"], result)
    if "pids" in directories:
        result.pids.SetInParent()
        _set(result.pids, "current", directories["pids"], "pids.current")
        _set(result.pids, "limit", directories["pids"], "pids.max")
    if "blkio" in directories:
        result.blkio.SetInParent()
        _read_blkio(directories["blkio"], result.blkio, devices)
    if "hugetlb" in directories:
        _read_hugetlb(directories["hugetlb"], result)
    if "rdma" in directories:
        result.rdma.SetInParent()
        for field, name in (("current", "rdma.current"), ("limit", "rdma.max")):
            for device, handles, objects in statfiles.rdma(directories["rdma"], name):
                getattr(result.rdma, field).add(
                    device=device, hca_handles=handles, hca_objects=objects
                )
    return result


def block_devices(partitions: str) -> dict[tuple[int, int], str]:
    """The paths of the machine's block devices.

    Args:
        partitions: the text of /proc/partitions; lines that are no device's are skipped.

    Returns:
        The paths by major and minor number, for example ``{(8, 0): "/dev/sda"}``.
    """
    devices: dict[tuple[int, int], str] = {}
    for line in partitions.splitlines():
        fields = line.split()
        if len(fields) == 4 and fields[0].isdigit() and fields[1].isdigit():  # noqa: PLR2004
            key = int(fields[0]), int(fields[1])
            devices.setdefault(key, os.path.join("/dev", fields[3]))
    return devices


def _set(message: object, field: str, directory: str, name: str) -> None:
    value = statfiles.number(directory, name, unlimited=0)
    if value is not None:
        setattr(message, field, value)


def _read_throttling(directory: str, throttling: v1.Throttle) -> None:
    stat = statfiles.table(directory, "cpu.stat")
    throttling.periods = stat.get("nr_periods", 0)
    throttling.throttled_periods = stat.get("nr_throttled", 0)
    throttling.throttled_time = stat.get("throttled_time", 0)


def _read_cpu_usage(directory: str, usage: v1.CPUUsage, ticks: int) -> None:
    _set(usage, "total", directory, "cpuacct.usage")
    stat = statfiles.table(directory, "cpuacct.stat")
    usage.user = min(stat.get("user", 0) * _NANOSECONDS // ticks, statfiles.MOST)
    usage.kernel = min(stat.get("system", 0) * _NANOSECONDS // ticks, statfiles.MOST)
    words = (statfiles.read(directory, "cpuacct.usage_percpu") or "").split()
    usage.per_cpu.extend(statfiles.to_number(word) or 0 for word in words)


def _read_memory(directory: str, result: v1.Metrics) -> None:
    memory, stat = result.memory, statfiles.table(directory, "memory.stat")
    for field in v1.MemoryStat.DESCRIPTOR.fields:
        if field.message_type is None:
            plain = field.name.removeprefix(_TOTAL)
            total = _TOTAL if plain != field.name else ""
            setattr(memory, field.name, stat.get(total + _MEMORY_KEYS.get(plain, plain), 0))
    for name, prefix in _MEMORY_ENTRIES.items():
        entry = getattr(memory, name)
        entry.SetInParent()
        for field_name, suffix in _MEMORY_ENTRY.items():
            _set(entry, field_name, directory, f"{prefix}.{suffix}")
    control = statfiles.read(directory, "memory.oom_control")
    if control is not None:
        values = statfiles.to_table(control)
        for field in v1.MemoryOomControl.DESCRIPTOR.fields:
            setattr(result.memory_oom_control, field.name, values.get(field.name, 0))
        result.memory_oom_control.SetInParent()


def _read_blkio(
    directory: str, blkio: v1.BlkIOStat, devices: Mapping[tuple[int, int], str]
) -> None:
    for field, names in _BLKIO.items():
        for name in names:
            entries = _blkio_entries(statfiles.read(directory, f"blkio.{name}") or "", devices)
            if entries:
                getattr(blkio, field).extend(entries)
                break


def _blkio_entries(text: str, devices: Mapping[tuple[int, int], str]) -> list[v1.BlkIOEntry]:
    """Lines are "MAJOR:MINOR [OPERATION] VALUE", and one of the sum over all devices."""
    entries = []
    for line in text.splitlines():
        device, *operation = line.split() or [""]
        value = operation.pop() if operation else ""
        major, _, minor = device.partition(":")
        numbers = [statfiles.to_number(word) for word in (major, minor, value)]
        if len(operation) > 1 or None in numbers:
            continue
        a, b, count = (n or 0 for n in numbers)
        entries.append(
            v1.BlkIOEntry(
                op="".join(operation), device=devices.get((a, b), ""), major=a, minor=b, value=count
            )
        )
    return entries


def _read_hugetlb(directory: str, result: v1.Metrics) -> None:
    for size in statfiles.page_sizes(directory, ".usage_in_bytes"):
        stat = result.hugetlb.add(pagesize=size)
        for field, suffix in (
            ("usage", "usage_in_bytes"),
            ("max", "max_usage_in_bytes"),
            ("failcnt", "failcnt"),
        ):
            _set(stat, field, directory, f"hugetlb.{size}.{suffix}")
