"""How long it takes to run many containers to their end at the same time."""

from __future__ import annotations

import subprocess
import time
from typing import TYPE_CHECKING

from tests.bench.interleaving import interleave
from tests.bench.results import Comparison, Results, Row
from tests.bench.stage import progress
from tests.harness.runtime import OURS, STOCK, Runtime

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.bench.stage import Stage


def measure_together(stage: Stage) -> Results:
    """Ten at once, thirty at once …, as many as the sizes say."""
    stock, ours = Runtime(stage.warm, STOCK), Runtime(stage.warm, OURS)
    rounds = max(4, stage.sizes.rounds // 3)
    comparisons = {}
    for count in stage.sizes.many:
        title = f"{count} `ctr run --rm` at once"
        cases = {"stock": _together(stock, count), "ours": _together(ours, count)}
        found = interleave(cases, rounds=rounds, warm_up=1, tell=progress(title, rounds))
        rows = {
            "stock": Row("containerd-shim-runc-v2", found["stock"].values),
            "ours": Row("containerd-shim-nvidia-v1", found["ours"].values, "stock"),
        }
        comparisons[f"at-once-{count}"] = Comparison(title, "ms", rows)
    return Results(comparisons=comparisons)


def _together(runtime: Runtime, count: int) -> Callable[[], float]:
    """What runs containers to their end at the same time; returns the milliseconds for all."""

    def once() -> float:
        begin = time.perf_counter()
        # What they say is not read while they run: it would be a part of what is measured.
        running = [
            runtime.containerd.spawn_ctr(
                *runtime.words("true", flags=("--rm",)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for _ in range(count)
        ]
        codes = [ctr.wait() for ctr in running]
        milliseconds = (time.perf_counter() - begin) * 1000
        if any(codes):
            raise RuntimeError(f"{sum(map(bool, codes))} of {count} containers failed")
        return milliseconds

    return once
