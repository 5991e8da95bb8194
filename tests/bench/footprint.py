"""The cost of idle shims: memory, and how often they wake up.

Many shims of one kind run at once, each with an idle container: containerd's own without GPUs,
then this project's without and with them. The single fork server is listed separately.

Source: proc(5), /proc/PID/smaps_rollup and /proc/PID/task/TID/status.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, Final

from integration.containers import traces
from integration.containers.memory import pss_and_uss
from tests.bench.results import Figure, Figures, Results
from tests.bench.stage import GPUS, say
from tests.harness.runtime import OURS, STOCK, Runtime
from tools.images import GLIBC

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.bench.stage import Stage

# Long enough for a shim to finish its work after a start.
_SETTLE: Final = 1.0

# By the key of a column: its heading, the runtime, the flags of its containers.
_KINDS: Final[dict[str, tuple[str, str, tuple[str, ...]]]] = {
    "stock": ("runc-v2", STOCK, ()),
    "ours": ("nvidia-v1", OURS, ()),
    "gpus": ("nvidia-v1, GPUs", OURS, GPUS),
}

# By the key of a row: its title and its unit.
_ROWS: Final = {
    "pss-alone": ("PSS, the only one", "MB"),
    "uss-alone": ("USS, the only one", "MB"),
    "pss": ("PSS, one of {count}", "MB"),
    "uss": ("USS, one of {count}", "MB"),
    "server-pss": ("PSS of the fork server in addition", "MB"),
    "server-uss": ("USS of it", "MB"),
    "wakeups": ("context switches in a minute", ""),
    "processor": ("processor time in a minute", "ms"),
}


def measure_idle(stage: Stage) -> Results:
    """Measure shims of each kind, one kind after another."""
    found = {}
    for kind, (heading, runtime, flags) in _KINDS.items():
        say(f"{stage.sizes.shims} idle shims: {heading}")
        found[kind] = measure_footprint(
            Runtime(stage.warm, runtime), stage.sizes.shims, flags, watch=stage.sizes.watch
        )
    rows = {
        key: Figure(title.format(count=stage.sizes.shims), unit,
                    {kind: values[key] for kind, values in found.items() if key in values})
        for key, (title, unit) in _ROWS.items()
    }  # fmt: skip
    columns = {kind: heading for kind, (heading, _, _) in _KINDS.items()}
    return Results(figures={"idle": Figures("an idle shim", columns, "stock", rows)})


def measure_footprint(
    runtime: Runtime, count: int, flags: tuple[str, ...] = (), *, watch: float
) -> dict[str, float]:
    """Start idle containers, each with its own shim, and measure the shims.

    Args:
        runtime: the runtime; its containers are removed.
        flags: more flags of ``ctr run``.
        watch: seconds to watch for wake-ups.

    Returns:
        Medians of memory and means of activity, by the key of their row; a shim of another kind
        has no fork server.
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
        found = {
            "pss-alone": first[0] / 1024,
            "uss-alone": first[1] / 1024,
            "pss": statistics.median(pss for pss, _ in memory) / 1024,
            "uss": statistics.median(uss for _, uss in memory) / 1024,
            "wakeups": statistics.mean(_differences(before, after, 0)) * minute,
            "processor": statistics.mean(_differences(before, after, 1)) * minute,
        }
        if runtime.is_ours:
            found["server-pss"] = sum(pss for pss, _ in servers) / 1024
            found["server-uss"] = sum(uss for _, uss in servers) / 1024
        return found
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
