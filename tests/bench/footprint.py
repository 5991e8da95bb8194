"""What idle shims cost: memory, and how often they wake up.

Source: proc(5), /proc/PID/smaps_rollup and /proc/PID/task/TID/status.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from integration.memory import pss_and_uss

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.harness.runtime import Runtime

# Long enough for a shim to have done what it does after a start.
_SETTLE: Final = 1.0


@dataclass(frozen=True, slots=True)
class Footprint:
    """Medians of the shims of one kind.

    Attributes:
        pss_of_one: KiB of the only shim, with its part of what it shares.
        uss_of_one: KiB that it has alone.
        pss_of_many: KiB of a shim among many.
        uss_of_many: likewise.
        wakeups: context switches of a shim among many, in a minute.
        processor: milliseconds of processor time of one, in a minute.
    """

    pss_of_one: float
    uss_of_one: float
    pss_of_many: float
    uss_of_many: float
    wakeups: float
    processor: float


def measure_footprint(runtime: Runtime, *, count: int, watch: float) -> Footprint:
    """Start idle containers, each with a shim of its own, and look at the shims.

    Args:
        runtime: the runtime; its containers are removed.
        count: how many containers.
        watch: seconds to watch for wake-ups.
    """
    flags = ("--null-io",)
    try:
        runtime.start_idle(flags=flags)
        time.sleep(_SETTLE)
        (first,) = map(pss_and_uss, runtime.containerd.shim_pids())
        for _ in range(count - 1):
            runtime.start_idle(flags=flags)
        time.sleep(_SETTLE)
        shims = runtime.containerd.shim_pids()
        memory = [pss_and_uss(pid) for pid in shims]
        before = [_activity(pid) for pid in shims]
        time.sleep(watch)
        after = [_activity(pid) for pid in shims]
        minute = 60 / watch
        return Footprint(
            pss_of_one=first[0],
            uss_of_one=first[1],
            pss_of_many=statistics.median(pss for pss, _ in memory),
            uss_of_many=statistics.median(uss for _, uss in memory),
            wakeups=statistics.mean(_differences(before, after, 0)) * minute,
            processor=statistics.mean(_differences(before, after, 1)) * minute,
        )
    finally:
        runtime.close()


def _activity(pid: int) -> tuple[float, float]:
    """Context switches, and milliseconds of processor time."""
    switches = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/status") as file:
            switches += sum(int(line.split()[1]) for line in file if "ctxt_switches:" in line)
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return switches, ticks * 1000 / os.sysconf("SC_CLK_TCK")


def _differences(
    before: Iterable[tuple[float, float]], after: Iterable[tuple[float, float]], which: int
) -> list[float]:
    return [b[which] - a[which] for a, b in zip(before, after, strict=True)]
