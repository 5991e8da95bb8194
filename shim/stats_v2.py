"""What a container has used, from the files of cgroup version 2.

Rules
- All controllers' files are in one directory. A file that is missing leaves its fields at zero:
  its controller is not enabled there, or the kernel is older.
- The parts for processes, cpu, memory, I/O and rdma are always there, if only with zeros, as in
  every answer of containerd's own shim: ctr and others look into them without asking.
- ``max`` is the largest number of 64 bits (of 32 bits in rdma).
- Times are microseconds, as the kernel has them.

Source: containerd/cgroups cgroup2/stats/metrics.proto; kernel
Documentation/admin-guide/cgroup-v2.rst, Documentation/accounting/psi.rst.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from api.proto import cgroups_v2_pb2 as v2
from shim import statfiles

if TYPE_CHECKING:
    from google.protobuf.message import Message

# Field of MemoryStat ← file; what is not here is a key of memory.stat of the same name.
_MEMORY_FILES: Final = {
    "usage": "memory.current",
    "usage_limit": "memory.max",
    "max_usage": "memory.peak",
    "swap_usage": "memory.swap.current",
    "swap_limit": "memory.swap.max",
    "swap_max_usage": "memory.swap.peak",
}

_IO_FIELDS: Final = ("rbytes", "wbytes", "rios", "wios")


def metrics(directory: str) -> v2.Metrics:
    """Read everything that the kernel offers.

    Args:
        directory: the container's cgroup.

    Returns:
        The message, with what could be read.
    """
    result = v2.Metrics()
    for part in (result.pids, result.cpu, result.memory, result.io, result.rdma):
        part.SetInParent()
    _set(result.pids, "current", directory, "pids.current")
    _set(result.pids, "limit", directory, "pids.max")
    _fill(result.cpu, statfiles.table(directory, "cpu.stat"))
    _read_pressure(directory, "cpu.pressure", result.cpu)
    stat = statfiles.table(directory, "memory.stat")
    _fill(result.memory, {k: v for k, v in stat.items() if k not in _MEMORY_FILES})
    for field, name in _MEMORY_FILES.items():
        _set(result.memory, field, directory, name)
    _read_pressure(directory, "memory.pressure", result.memory)
    events = statfiles.table(directory, "memory.events")
    if events:
        result.memory_events.SetInParent()
        _fill(result.memory_events, events)
    _read_io(directory, result.io)
    _read_pressure(directory, "io.pressure", result.io)
    for entries, name in ((result.rdma.current, "rdma.current"), (result.rdma.limit, "rdma.max")):
        for device, handles, objects in statfiles.rdma(directory, name):
            entries.add(device=device, hca_handles=handles, hca_objects=objects)
    for size in statfiles.page_sizes(directory, ".current"):
        pages = result.hugetlb.add(pagesize=size)
        _set(pages, "current", directory, f"hugetlb.{size}.current")
        _set(pages, "max", directory, f"hugetlb.{size}.max")
        # How often the limit stood in the way.
        pages.failcnt = statfiles.table(directory, f"hugetlb.{size}.events").get("max", 0)
    return result


def _set(message: Message, field: str, directory: str, name: str) -> None:
    value = statfiles.number(directory, name)
    if value is not None:
        setattr(message, field, value)


def _fill(message: Message, values: dict[str, int]) -> None:
    """Set the fields that have the name of a key; other keys and fields stay as they are."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is None and field.name in values:
            setattr(message, field.name, values[field.name])


def _read_io(directory: str, io: v2.IOStat) -> None:
    for device, pairs in statfiles.nested(directory, "io.stat"):
        major, _, minor = device.partition(":")
        numbers = statfiles.to_number(major), statfiles.to_number(minor)
        if None in numbers:
            continue
        entry = io.usage.add(major=numbers[0] or 0, minor=numbers[1] or 0)
        for field in _IO_FIELDS:
            setattr(entry, field, statfiles.to_number(pairs.get(field, "0")) or 0)


def _read_pressure(
    directory: str, name: str, message: v2.CPUStat | v2.MemoryStat | v2.IOStat
) -> None:
    """Pressure stall information, which a kernel may have and not offer: then reading fails."""
    for share, pairs in statfiles.nested(directory, name):
        if share not in ("some", "full"):
            continue
        data = getattr(message.psi, share)
        data.SetInParent()
        for average in ("avg10", "avg60", "avg300"):
            setattr(data, average, _to_float(pairs.get(average, "")))
        data.total = statfiles.to_number(pairs.get("total", "")) or 0


def _to_float(text: str) -> float:
    whole, _, part = text.partition(".")
    return float(text) if (whole + part).isascii() and (whole + part).isdigit() else 0.0
