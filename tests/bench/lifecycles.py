"""How much processor time a container's whole life takes, of everybody but the client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from integration.images import GLIBC
from tests.bench.interleaving import interleave
from tests.bench.results import Comparison, Results, Row
from tests.bench.runs import once
from tests.bench.stage import GPUS, progress
from tests.harness.runtime import OURS, STOCK, Runtime

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.bench.processor import Meter
    from tests.bench.stage import Stage

# What containerd does now and then, and a reading's own error, are shared by so many.
_BATCH: Final = 4


def measure_lifecycles(stage: Stage) -> Results:
    """Warm, with and without GPUs."""
    meter = stage.metered
    stock, ours = (Runtime(meter.containerd, runtime) for runtime in (STOCK, OURS))
    cases = {
        "stock": _metered(meter, once(stock, GLIBC)),
        "again": _metered(meter, once(stock, GLIBC)),
        "ours": _metered(meter, once(ours, GLIBC)),
        "gpus": _metered(meter, once(ours, GLIBC, GPUS)),
    }
    rounds = max(3, stage.sizes.rounds // 2)
    title = "processor time of a container's life"
    found = interleave(cases, rounds=rounds, warm_up=1, tell=progress(title, rounds))
    rows = {
        "stock": Row("containerd-shim-runc-v2", found["stock"].values),
        "again": Row("the same again (the noise)", found["again"].values, "stock"),
        "ours": Row("containerd-shim-nvidia-v1", found["ours"].values, "stock"),
        "gpus": Row("the same with two GPUs, all capabilities", found["gpus"].values, "stock"),
    }
    return Results(comparisons={"cpu": Comparison(title, "ms", rows)})


def _metered(meter: Meter, run: Callable[[], float]) -> Callable[[], float]:
    """What runs some containers, and returns the milliseconds of processor time for each."""

    def measure() -> float:
        meter.settle()
        before = meter.read()
        for _ in range(_BATCH):
            run()
        meter.settle()
        return (meter.read() - before) * 1000 / _BATCH

    return measure
