"""What idle shims cost: memory, and how often they wake up.

Many shims of one kind run at once, each with an idle container: containerd's own without GPUs,
then this project's without and with them. The fork server, which is there once, is told apart.

Source: proc(5), /proc/PID/smaps_rollup and /proc/PID/task/TID/status.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from integration import traces
from integration.images import GLIBC
from integration.memory import pss_and_uss
from tests.bench.results import Figure, Figures, Results
from tests.bench.stage import GPUS, say
from tests.harness.runtime import OURS, STOCK, Runtime

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.bench.stage import Stage

# Long enough for a shim to have done what it does after a start.
_SETTLE: Final = 1.0

# By the key of a column: its heading, the runtime, the flags of its containers.
_KINDS: Final[dict[str, tuple[str, str, tuple[str, ...]]]] = {
    "stock": ("runc-v2", STOCK, ()),
    "ours": ("nvidia-v1", OURS, ()),
    "gpus": ("nvidia-v1, GPUs", OURS, GPUS),
}


@dataclass(frozen=True, slots=True)
class Footprint:
    """Medians of the shims of one kind.

    Attributes:
        pss_of_one: KiB of the only shim, with its part of what it shares.
        uss_of_one: KiB that it has alone.
        pss: KiB of a shim among many.
        uss: likewise.
        wakeups: context switches of a shim among many, in a minute.
        processor: milliseconds of processor time of one, in a minute.
        server_pss: KiB of the fork server beside them; 0 if there is none.
        server_uss: likewise.
    """

    pss_of_one: float
    uss_of_one: float
    pss: float
    uss: float
    wakeups: float
    processor: float
    server_pss: float
    server_uss: float


def measure_idle(stage: Stage) -> Results:
    """Shims of each kind, one kind after the other."""
    found = {}
    for kind, (heading, runtime, flags) in _KINDS.items():
        say(f"{stage.sizes.shims} idle shims: {heading}")
        found[kind] = measure_footprint(
            Runtime(stage.warm, runtime), stage.sizes.shims, flags, watch=stage.sizes.watch
        )
    count = stage.sizes.shims

    def row(title: str, unit: str, field: str, divisor: float = 1) -> Figure:
        values = {kind: getattr(each, field) / divisor for kind, each in found.items()}
        return Figure(title, unit, {k: v for k, v in values.items() if v or "server" not in field})

    rows = {
        "pss-alone": row("PSS, the only one", "MB", "pss_of_one", 1024),
        "uss-alone": row("USS, the only one", "MB", "uss_of_one", 1024),
        "pss": row(f"PSS, one of {count}", "MB", "pss", 1024),
        "uss": row(f"USS, one of {count}", "MB", "uss", 1024),
        "server-pss": row("PSS of the fork server beside them", "MB", "server_pss", 1024),
        "server-uss": row("USS of it", "MB", "server_uss", 1024),
        "wakeups": row("context switches in a minute", "", "wakeups"),
        "processor": row("processor time in a minute", "ms", "processor"),
    }
    columns = {kind: heading for kind, (heading, _, _) in _KINDS.items()}
    return Results(figures={"idle": Figures("an idle shim", columns, "stock", rows)})


def measure_footprint(
    runtime: Runtime, count: int, flags: tuple[str, ...] = (), *, watch: float
) -> Footprint:
    """Start idle containers, each with a shim of its own, and look at the shims.

    Args:
        runtime: the runtime; its containers are removed.
        count: how many containers.
        flags: more flags of ``ctr run``.
        watch: seconds to watch for wake-ups.
    """
    flags = ("--null-io", *flags)
    try:
        runtime.start_idle(image=GLIBC, flags=flags)
        time.sleep(_SETTLE)
        (first,) = map(pss_and_uss, runtime.containerd.shim_pids())
        for _ in range(count - 1):
            runtime.start_idle(image=GLIBC, flags=flags)
        time.sleep(_SETTLE)
        shims = runtime.containerd.shim_pids()
        if len(shims) != count:
            raise RuntimeError(f"{len(shims)} shims run, not {count}")
        memory = [pss_and_uss(pid) for pid in shims]
        servers = [pss_and_uss(pid) for pid in traces.fork_servers(runtime.containerd.marks)]
        before = [_activity(pid) for pid in shims]
        time.sleep(watch)
        after = [_activity(pid) for pid in shims]
        minute = 60 / watch
        return Footprint(
            pss_of_one=first[0],
            uss_of_one=first[1],
            pss=statistics.median(pss for pss, _ in memory),
            uss=statistics.median(uss for _, uss in memory),
            wakeups=statistics.mean(_differences(before, after, 0)) * minute,
            processor=statistics.mean(_differences(before, after, 1)) * minute,
            server_pss=sum(pss for pss, _ in servers) if runtime.is_ours else 0,
            server_uss=sum(uss for _, uss in servers) if runtime.is_ours else 0,
        )
    finally:
        runtime.close()


def _activity(pid: int) -> tuple[float, float]:
    """Context switches, and milliseconds of processor time."""
    switches = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/status", encoding="ascii") as file:
            switches += sum(int(line.split()[1]) for line in file if "ctxt_switches:" in line)
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return switches, ticks * 1000 / os.sysconf("SC_CLK_TCK")


def _differences(
    before: Iterable[tuple[float, float]], after: Iterable[tuple[float, float]], which: int
) -> list[float]:
    return [b[which] - a[which] for a, b in zip(before, after, strict=True)]
