"""The cost of a start: time, next to containerd's own shim, and memory of idle shims.

Source: proc(5), /proc/PID/smaps_rollup.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from typing import Any, Final

from integration.containers.memory import pss_and_uss
from tools.gpu.checks import Subject
from tools.gpu.containers import OURS, STOCK, asking
from tools.gpu.report import Report, not_possible

_COLD_ROUNDS: Final = 3
_SETTLE: Final = 1.0

# The measured containers, by their name in the report: the shim and the request.
_RUNS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "containerd-shim-runc-v2": (STOCK, ()),
    "containerd-shim-nvidia-v1": (OURS, ()),
    "  with GPUs, compute and utility": (OURS, asking("all")),
    "  with GPUs, all capabilities": (OURS, asking("all", "all")),
}
_TITLE_TIME: Final = "Time of `ctr run --rm` of `true`"
_TITLE_STEPS: Final = "Injection, all capabilities: milliseconds by step"
_TITLE_MEMORY: Final = "Memory of idle shims"


def measure(subject: Subject, report: Report, *, rounds: int, shims: int) -> None:
    """Measure, and add the results to the report.

    Args:
        rounds: of starts, each kind once in a round.
    """
    report.check("starts are measured", lambda: _measure_starts(subject, report, rounds))
    report.check("memory is measured", lambda: _measure_memory(subject, report, shims))


def _measure_starts(subject: Subject, report: Report, rounds: int) -> str:
    containers = subject.containers
    times: dict[str, list[float]] = {name: [] for name in _RUNS}
    cold: list[float] = []
    cold_gpu: list[float] = []
    for _ in range(min(rounds, _COLD_ROUNDS)):
        containers.containerd.end_fork_servers()
        cold.append(containers.timed())
        containers.containerd.end_fork_servers()
        cold_gpu.append(containers.timed(flags=asking("all", "all")))
    for _ in range(rounds):
        for name, (runtime, flags) in _RUNS.items():
            times[name].append(containers.timed(flags=flags, runtime=runtime))
            if time.monotonic() > report.deadline:
                break
    series = {
        **times,
        "containerd-shim-nvidia-v1, the first on a node": cold,
        "  with GPUs, all capabilities, the first on a node": cold_gpu,
    }
    report.values["run_ms"] = series
    stock = statistics.median(times["containerd-shim-runc-v2"])
    report.tell(_TITLE_TIME, ((name, _spread(v, stock)) for name, v in series.items() if v))
    gpu = statistics.median(times["  with GPUs, compute and utility"])
    return f"{stock:.0f} ms with containerd-shim-runc-v2, {gpu:.0f} ms with ours and GPUs"


def _spread(values: list[float], stock: float) -> str:
    median = statistics.median(values)
    return (
        f"{median:.0f} ms (÷ {median / stock:.2f}; "
        f"{min(values):.0f} to {max(values):.0f} in {len(values)})"
    )


def _measure_memory(subject: Subject, report: Report, shims: int) -> str:
    kinds = {
        "containerd-shim-runc-v2": (STOCK, ()),
        "containerd-shim-nvidia-v1": (OURS, ()),
        "  with GPUs, all capabilities": (OURS, asking("all", "all")),
    }
    found: dict[str, Any] = {}
    for name, (runtime, flags) in kinds.items():
        with ExitStack() as running:
            started = [
                running.enter_context(subject.containers.started(flags=flags, runtime=runtime))
                for _ in range(shims)
            ]
            time.sleep(_SETTLE)
            try:
                memory = [pss_and_uss(pid) for pid in subject.containers.containerd.shim_pids()]
            except OSError as error:
                raise not_possible(f"this kernel does not tell: {error}") from error
            found[name] = {
                "pss_kib": statistics.median(pss for pss, _ in memory),
                "uss_kib": statistics.median(uss for _, uss in memory),
            }
            if "GPU" in name:
                _tell_steps(report, [c.record["milliseconds"] for c in started])
    report.values["idle"] = {"shims": shims, **found}
    report.tell(
        _TITLE_MEMORY,
        (
            (name, f"{v['pss_kib'] / 1024:.1f} MiB PSS, {v['uss_kib'] / 1024:.1f} MiB of its own")
            for name, v in found.items()
        ),
    )
    stock, ours = found["containerd-shim-runc-v2"], found["  with GPUs, all capabilities"]
    return (
        f"PSS of one of {shims}: {stock['pss_kib'] / 1024:.1f} MiB with containerd-shim-runc-v2, "
        f"{ours['pss_kib'] / 1024:.1f} MiB with ours and GPUs"
    )


def _tell_steps(report: Report, laps: list[dict[str, float]]) -> None:
    medians = {step: statistics.median(lap[step] for lap in laps) for step in laps[0]}
    report.values["injection_ms"] = medians
    report.tell(_TITLE_STEPS, ((step, f"{value:.2f}") for step, value in medians.items()))
    report.tell(_TITLE_STEPS, [("in all", f"{sum(medians.values()):.2f}")])
