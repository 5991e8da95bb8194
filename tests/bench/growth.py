"""What many execs leave in a shim: memory and descriptors.

Source: proc(5), /proc/PID/status and /proc/PID/fd.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from api import typeurl
from tests.bench.results import Figure, Figures, Results
from tests.bench.rpc import Shim
from tests.bench.stage import say
from tests.harness.runtime import OURS, STOCK, Runtime, new_name

if TYPE_CHECKING:
    from tests.bench.stage import Stage
    from tests.harness.runtime import Container

_WARM_UP: Final = 50
_TRUE: Final = {"args": ["true"], "cwd": "/", "env": ["PATH=/bin"], "user": {"uid": 0, "gid": 0}}


def measure_growth(stage: Stage) -> Results:
    """Measure a shim of each kind, one after another."""
    count = stage.sizes.execs
    memory: dict[str, float] = {}
    descriptors: dict[str, float] = {}
    for key, name in (("stock", STOCK), ("ours", OURS)):
        say(f"{count} execs in a shim of {name}")
        runtime = Runtime(stage.warm, name)
        try:
            before, after = _grow(runtime.start_idle(flags=("--null-io",)), count)
        finally:
            runtime.close()
        memory[key] = after[0] / before[0]
        descriptors[key] = after[1] / before[1]
    rows = {
        "resident": Figure("resident memory", "", memory),
        "descriptors": Figure("open descriptors", "", descriptors),
    }
    title = f"a shim after {count} execs, ÷ before"
    columns = {"stock": "runc-v2", "ours": "nvidia-v1"}
    return Results(figures={"growth": Figures(title, columns, None, rows)})


def _grow(container: Container, count: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return KiB of resident memory and descriptors, before and after."""
    with Shim.of(container) as shim:
        pid = shim.call("Connect", id=container.name).shim_pid
        _run_execs(shim, container.name, _WARM_UP)
        before = _resident(pid), _descriptors(pid)
        _run_execs(shim, container.name, count)
        return before, (_resident(pid), _descriptors(pid))


def _run_execs(shim: Shim, container: str, count: int) -> None:
    spec = typeurl.pack_json(_TRUE, typeurl.PROCESS)
    for _ in range(count):
        both: dict[str, Any] = {"id": container, "exec_id": new_name("e")}
        shim.call("Exec", **both, spec=spec)
        for method in ("Start", "Wait", "Delete"):
            shim.call(method, **both)


def _resident(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS:"))


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
