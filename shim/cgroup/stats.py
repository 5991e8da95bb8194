"""A container's resource usage, as containerd's message.

Rules
- The tables below give the file, and the key in it, of each field of the message.
- A missing or unreadable file counts as empty, so its fields stay zero: its controller is not
  enabled, the kernel is older, or the cgroup was just removed. Anything but a number is skipped.
  Neither is an error.
- Version 1 has a directory for each controller. The message omits controllers in which the
  container has no cgroup, except cpu, which clients read without a check. ``max`` is zero.
  cpuacct.stat counts ticks; all other times are in nanoseconds.
- Version 2 has one directory. For the same reason, the message always has pids, cpu, memory, io and
  rdma. ``max`` is the largest number of 64 bits (in rdma, of 32 bits). Times are in microseconds.
- Block I/O of version 1: a file without a scheduler in its name belongs to CFQ, which Linux 5.0
  removed. Next come the files of the throttling layer, common to all schedulers, and those of BFQ.
  Files that include the cgroups below come first.
- Network counters are those of the container's own network namespace, never the host's.

Source: containerd docs/runtime-v2.md; containerd/cgroups cgroup1 and cgroup2 stats/metrics.proto;
kernel Documentation/admin-guide/cgroup-v1 (memory.rst, cpuacct.rst, blkio-controller.rst,
hugetlb.rst, pids.rst, rdma.rst), cgroup-v2.rst, Documentation/accounting/psi.rst;
proc_pid_net(5).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from operator import attrgetter
from typing import Final

from google.protobuf.message import Message

from api.proto import cgroups_v1_pb2 as v1
from api.proto import cgroups_v2_pb2 as v2
from shim.cgroup.cgroup import UNIFIED, Cgroup
from shim.errors import CgroupNotFound

MOST: Final = 2**64 - 1
"""The largest number, which replaces larger ones."""

# Today's memory.stat has 2 kB, usage_percpu on the largest machines 160 kB.
_LIMIT: Final = 1 << 20
_DIGITS: Final = 30  # more than a 64-bit number has
_UNITS: Final = ("KB", "MB", "GB")

_NANOSECONDS: Final = 1_000_000_000

# In place of the directory of a controller without the container: it contains no files.
_NO_DIRECTORY: Final = "/dev/null"

# Field ← file with a single number.
_V1_NUMBERS: Final = {
    "cpu.usage.total": "cpuacct.usage",
    "pids.current": "pids.current",
    "pids.limit": "pids.max",
} | {
    f"memory.{entry}.{field}": f"{prefix}.{suffix}"
    for entry, prefix in {
        "usage": "memory",
        "swap": "memory.memsw",
        "kernel": "memory.kmem",
        "kernel_tcp": "memory.kmem.tcp",
    }.items()
    for field, suffix in {
        "limit": "limit_in_bytes",
        "usage": "usage_in_bytes",
        "max": "max_usage_in_bytes",
        "failcnt": "failcnt",
    }.items()
}
_V2_NUMBERS: Final = {
    "pids.current": "pids.current",
    "pids.limit": "pids.max",
    "memory.usage": "memory.current",
    "memory.usage_limit": "memory.max",
    "memory.max_usage": "memory.peak",
    "memory.swap_usage": "memory.swap.current",
    "memory.swap_limit": "memory.swap.max",
    "memory.swap_max_usage": "memory.swap.peak",
}

# Message ← file with a key and a number in each line.
_V1_TABLES: Final = {
    "cpu.throttling": "cpu.stat",
    "memory": "memory.stat",
    "memory_oom_control": "memory.oom_control",
}
_V2_TABLES: Final = {
    "cpu": "cpu.stat",
    "memory": "memory.stat",
    "memory_events": "memory.events",
}

# Field ← key, where their names differ.
_V1_KEYS: Final = {
    "periods": "nr_periods",
    "throttled_periods": "nr_throttled",
    "hierarchical_swap_limit": "hierarchical_memsw_limit",
} | {
    f"{total}{field}": f"{total}{key}"
    for total in ("", "total_")
    for field, key in {
        "pg_pg_in": "pgpgin",
        "pg_pg_out": "pgpgout",
        "pg_fault": "pgfault",
        "pg_maj_fault": "pgmajfault",
    }.items()
}

# Field of each huge page size ← end of the file's name.
_V1_PAGES: Final = {"usage": "usage_in_bytes", "max": "max_usage_in_bytes", "failcnt": "failcnt"}
_V2_PAGES: Final = {"current": "current", "max": "max"}

# Field of BlkIOStat ← files, of which the first with entries counts.
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

# The used columns of /proc/net/dev: four received, four sent.
_NETWORK: Final = {
    f"{direction}_{counter}": first + column
    for direction, first in {"rx": 0, "tx": 8}.items()
    for column, counter in enumerate(("bytes", "packets", "errors", "dropped"))
}
_NETWORK_COLUMNS: Final = 16


def read(cgroup: Cgroup | None, *, container_id: str, pid: int) -> v1.Metrics | v2.Metrics:
    """Read the statistics of a container.

    Args:
        cgroup: the container's cgroup; None if it has none of its own.
        container_id: the container's id, for the error.
        pid: its init process, for the network interfaces; 0 if it has exited.

    Returns:
        The message of the cgroup version that has the controllers.

    Raises:
        CgroupNotFound: it has no cgroup, or the cgroup was removed.
    """
    asked = f"statistics of {container_id}"
    if cgroup is None:
        raise CgroupNotFound(
            asked, found="no cgroup of its own", do="let the runtime make one: set cgroupsPath"
        )
    existing = {
        controller: directory
        for controller, directory in cgroup.directories.items()
        if (controller == UNIFIED) == cgroup.is_v2 and os.path.isdir(directory)
    }
    if not existing:
        raise CgroupNotFound(asked, found="its cgroup is gone", do="ask while the task runs")
    result: v1.Metrics | v2.Metrics
    if cgroup.is_v2:
        result = metrics_v2(existing[UNIFIED])
    else:
        devices = block_devices(text_of("/proc", "partitions"))
        result = metrics_v1(existing, devices, ticks=os.sysconf("SC_CLK_TCK"))
    for name, counters in interfaces_of(pid).items() if pid else ():
        result.network.add(name=name, **counters)
    return result


def metrics_v1(
    directories: Mapping[str, str], devices: Mapping[tuple[int, int], str], *, ticks: int
) -> v1.Metrics:
    """Read the files of cgroup version 1.

    Args:
        directories: the container's directory in each controller's hierarchy.
        devices: the paths of block devices, by major and minor number.
        ticks: the clock ticks per second (``sysconf(_SC_CLK_TCK)``).
    """
    result = v1.Metrics(cpu=v1.CPUStat(usage=v1.CPUUsage(), throttling=v1.Throttle()))
    memory = result.memory
    parts: dict[str, tuple[Message, ...]] = {
        "pids": (result.pids,),
        "memory": (memory.usage, memory.swap, memory.kernel, memory.kernel_tcp),
        "blkio": (result.blkio,),
        "rdma": (result.rdma,),
    }
    for controller, messages in parts.items():
        for message in messages if controller in directories else ():
            message.SetInParent()
    for path, name in _V1_NUMBERS.items():
        _set_number(result, path, _of_controller(directories, name), name, unlimited=0)
    for path, name in _V1_TABLES.items():
        _fill(attrgetter(path)(result), _of_controller(directories, name), name, _V1_KEYS)
    cpuacct = directories.get("cpuacct", _NO_DIRECTORY)
    stat, usage = table(text_of(cpuacct, "cpuacct.stat")), result.cpu.usage
    usage.user = min(stat.get("user", 0) * _NANOSECONDS // ticks, MOST)
    usage.kernel = min(stat.get("system", 0) * _NANOSECONDS // ticks, MOST)
    words = text_of(cpuacct, "cpuacct.usage_percpu").split()
    usage.per_cpu.extend(number(word) or 0 for word in words)
    if "blkio" in directories:
        _read_blkio(directories["blkio"], result.blkio, devices)
    hugetlb = directories.get("hugetlb", _NO_DIRECTORY)
    for size in page_sizes(hugetlb, ".usage_in_bytes"):
        pages = result.hugetlb.add(pagesize=size)
        for field, suffix in _V1_PAGES.items():
            _set_number(pages, field, hugetlb, f"hugetlb.{size}.{suffix}", unlimited=0)
    if "rdma" in directories:
        _read_rdma(result, directories["rdma"])
    return result


def metrics_v2(directory: str) -> v2.Metrics:
    """Read the files of cgroup version 2.

    Args:
        directory: the container's cgroup.
    """
    result = v2.Metrics()
    for part in (result.pids, result.cpu, result.memory, result.io, result.rdma):
        part.SetInParent()
    # memory.stat may have keys with the names of fields that have their own file.
    own_file = {path.rpartition(".")[2]: "" for path in _V2_NUMBERS}
    for path, name in _V2_TABLES.items():
        _fill(attrgetter(path)(result), directory, name, own_file)
    for path, name in _V2_NUMBERS.items():
        _set_number(result, path, directory, name)
    for message, name in ((result.cpu, "cpu"), (result.memory, "memory"), (result.io, "io")):
        _read_pressure(directory, f"{name}.pressure", message)
    for device, pairs in nested(text_of(directory, "io.stat")):
        major, minor = map(number, device.partition(":")[::2])
        if major is not None and minor is not None:
            entry = result.io.usage.add(major=major, minor=minor)
            for field in ("rbytes", "wbytes", "rios", "wios"):
                setattr(entry, field, number(pairs.get(field, "0")) or 0)
    for size in page_sizes(directory, ".current"):
        pages = result.hugetlb.add(pagesize=size)
        for field, suffix in _V2_PAGES.items():
            _set_number(pages, field, directory, f"hugetlb.{size}.{suffix}")
        # How often the limit refused an allocation.
        pages.failcnt = table(text_of(directory, f"hugetlb.{size}.events")).get("max", 0)
    _read_rdma(result, directory)
    return result


def block_devices(partitions: str) -> dict[tuple[int, int], str]:
    """Return the paths of block devices by major and minor number: ``{(8, 0): "/dev/sda"}``.

    Args:
        partitions: the text of /proc/partitions; lines without a device are skipped.
    """
    devices: dict[tuple[int, int], str] = {}
    for line in partitions.splitlines():
        fields = line.split()
        if len(fields) == 4 and fields[0].isdigit() and fields[1].isdigit():  # noqa: PLR2004
            key = int(fields[0]), int(fields[1])
            devices.setdefault(key, os.path.join("/dev", fields[3]))
    return devices


def interfaces_of(pid: int) -> dict[str, dict[str, int]]:
    """Return a container's network interfaces, each with its counters by field name.

    Args:
        pid: a process of the container.

    Returns:
        Empty if the process has exited, or shares the shim's network namespace, since the host's
        traffic is not the container's.
    """
    try:
        shared = os.stat("/proc/self/ns/net").st_ino == os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return {}
    return {} if shared else parse_interfaces(text_of(f"/proc/{pid}/net", "dev"))


def parse_interfaces(text: str) -> dict[str, dict[str, int]]:
    """Return the interfaces in a /proc/net/dev. Other lines, such as its headings, are skipped."""
    interfaces = {}
    for line in text.splitlines():
        name, _, rest = line.rpartition(":")
        columns = [n for word in rest.split() if (n := number(word)) is not None]
        if name and len(columns) == len(rest.split()) >= _NETWORK_COLUMNS:
            interfaces[name.strip()] = {field: columns[at] for field, at in _NETWORK.items()}
    return interfaces


def _of_controller(directories: Mapping[str, str], name: str) -> str:
    """Return the directory of a version 1 file, whose name starts with its controller's."""
    return directories.get(name.partition(".")[0], _NO_DIRECTORY)


def _set_number(
    message: Message, path: str, directory: str, name: str, *, unlimited: int = MOST
) -> None:
    value = number(text_of(directory, name), unlimited=unlimited)
    if value is not None:
        parent, _, field = path.rpartition(".")
        setattr(attrgetter(parent)(message) if parent else message, field, value)


def _fill(message: Message, directory: str, name: str, keys: Mapping[str, str]) -> None:
    """Set the fields whose keys are in a file; ignore other keys and fields."""
    values = table(text_of(directory, name))
    if values:
        message.SetInParent()
    for field in message.DESCRIPTOR.fields:
        value = values.get(keys.get(field.name, field.name))
        if field.message_type is None and value is not None:
            setattr(message, field.name, value)


def _read_blkio(
    directory: str, blkio: v1.BlkIOStat, devices: Mapping[tuple[int, int], str]
) -> None:
    for field, names in _BLKIO.items():
        texts = (text_of(directory, f"blkio.{name}") for name in names)
        entries = next(filter(None, (_blkio_entries(text, devices) for text in texts)), [])
        getattr(blkio, field).extend(entries)


def _blkio_entries(text: str, devices: Mapping[tuple[int, int], str]) -> list[v1.BlkIOEntry]:
    """Parse lines "MAJOR:MINOR [OPERATION] VALUE", besides one with the sum over all devices."""
    entries = []
    for line in text.splitlines():
        device, *operation = line.split() or [""]
        value = operation.pop() if operation else ""
        major, minor, count = map(number, (*device.partition(":")[::2], value))
        if len(operation) > 1 or major is None or minor is None or count is None:
            continue
        path = devices.get((major, minor), "")
        op = "".join(operation)
        entries.append(v1.BlkIOEntry(op=op, device=path, major=major, minor=minor, value=count))
    return entries


def _read_rdma(result: v1.Metrics | v2.Metrics, directory: str) -> None:
    for field, name in (("current", "rdma.current"), ("limit", "rdma.max")):
        for device, handles, objects in rdma(text_of(directory, name)):
            getattr(result.rdma, field).add(device=device, hca_handles=handles, hca_objects=objects)


def _read_pressure(
    directory: str, name: str, message: v2.CPUStat | v2.MemoryStat | v2.IOStat
) -> None:
    """Read pressure stall information. A kernel may have the file but refuse to read it."""
    for share, pairs in nested(text_of(directory, name)):
        if share not in ("some", "full"):
            continue
        data = getattr(message.psi, share)
        data.SetInParent()
        for average in ("avg10", "avg60", "avg300"):
            setattr(data, average, _to_float(pairs.get(average, "")))
        data.total = number(pairs.get("total", "")) or 0


def _to_float(text: str) -> float:
    whole, _, part = text.partition(".")
    return float(text) if (whole + part).isascii() and (whole + part).isdigit() else 0.0


# -- the kernel's number files ---------------------------------------------------------------


def text_of(directory: str, name: str) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        with open(os.path.join(directory, name), "rb") as file:
            return file.read(_LIMIT).decode(errors="replace")
    except OSError:
        return ""


def number(text: str, *, unlimited: int = MOST) -> int | None:
    """Parse a number.

    Args:
        text: decimal digits, a negative number, or ``max``, perhaps with surrounding blanks.
        unlimited: the number to return for ``max``.

    Returns:
        The number, limited to an unsigned 64-bit integer; None if it is not a number.
    """
    text = text.strip()
    if text == "max":
        return unlimited
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        return None
    return 0 if digits != text else min(int(digits[:_DIGITS]), MOST)


def table(text: str) -> dict[str, int]:
    """Return the numbers in a flat keyed file, whose lines are a key and a number."""
    pairs = (line.split() for line in text.splitlines())
    entries = ((p[0], number(p[1])) for p in pairs if len(p) == 2)  # noqa: PLR2004 - a pair
    return {key: value for key, value in entries if value is not None}


def nested(text: str) -> list[tuple[str, dict[str, str]]]:
    """Return the entries of a nested keyed file, whose lines are a key and pairs ``name=value``.

    Returns:
        Each key with its pairs, in the order of the lines; keys without a pair are left out.
    """
    entries = []
    for line in text.splitlines():
        key, *words = line.split() or [""]
        pairs = dict(word.split("=", 1) for word in words if "=" in word)
        if pairs:
            entries.append((key, pairs))
    return entries


def page_sizes(directory: str, suffix: str) -> list[str]:
    """Return the huge page sizes in a hugetlb directory, largest first.

    Args:
        directory: the directory of the cgroup, in the hierarchy with the hugetlb controller.
        suffix: the end of the files' names: ``.current``, ``.usage_in_bytes``.

    Returns:
        The sizes in the kernel's form: "1GB", "2MB", "64KB".
    """
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    # hugetlb.2MB.rsvd.current is a different file, which counts reservations.
    parts = (name[: -len(suffix)].split(".") for name in names if name.endswith(suffix))
    sizes = [part[1] for part in parts if len(part) == 2 and part[0] == "hugetlb"]  # noqa: PLR2004
    return sorted(sizes, key=_bytes, reverse=True)


def _bytes(size: str) -> tuple[int, int]:
    value, unit = number(size[:-2]) or 0, size[-2:]
    return (_UNITS.index(unit), value) if unit in _UNITS else (-1, value)


def rdma(text: str) -> list[tuple[str, int, int]]:
    """Return the entries of an rdma file: device, handles and objects of each.

    ``max`` is the largest number of 32 bits, as in the message's field.
    """
    most = 2**32 - 1
    entries = []
    for device, pairs in nested(text):
        handles = number(pairs.get("hca_handle", "0"), unlimited=most)
        objects = number(pairs.get("hca_object", "0"), unlimited=most)
        entries.append((device, min(handles or 0, most), min(objects or 0, most)))
    return entries
