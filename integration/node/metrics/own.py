"""The agent's own process, as every exporter tells of its own.

Source: proc_pid_stat(5), proc_pid_limits(5); Prometheus' "Writing client libraries", "Process
metrics".
"""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING, Final

from integration.node.metrics import families as f
from integration.node.metrics.text import Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.node.metrics.families import Family

__all__ = ["own_process"]

_SELF: Final = "/proc/self"  # ours, and not the simulated node's
# Fields of stat after the name, which is in brackets.
_START, _SIZE, _RESIDENT = 19, 20, 21


def own_process(boot: float) -> Iterator[tuple[Family, list[Row]]]:
    """What the agent's process is like.

    Args:
        boot: when the node was booted, in seconds since the epoch.
    """
    for family, who in ((f.CPU, resource.RUSAGE_SELF), (f.CHILDREN_CPU, resource.RUSAGE_CHILDREN)):
        taken = resource.getrusage(who)
        yield family, [Row((), round(taken.ru_utime + taken.ru_stime, 6))]
    try:
        with open(f"{_SELF}/stat", encoding="utf-8", errors="replace") as file:
            stat = file.read().rpartition(")")[2].split()
        descriptors = len(os.listdir(f"{_SELF}/fd")) - 1
    except OSError:  # another node's procfs, or none
        return
    yield f.VIRTUAL, [Row((), int(stat[_SIZE]))]
    yield f.RESIDENT, [Row((), int(stat[_RESIDENT]) * resource.getpagesize())]
    began = boot + int(stat[_START]) / os.sysconf("SC_CLK_TCK")
    yield f.STARTED, [Row((), round(began, 2))]
    yield f.OPEN_FDS, [Row((), descriptors)]
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY:
        yield f.MAX_FDS, [Row((), limit)]
