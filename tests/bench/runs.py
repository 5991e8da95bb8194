"""How long ``ctr run --rm`` of ``true`` takes: warm, cold, with GPUs, and with crun."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from integration import traces
from integration.images import BUSYBOX, GLIBC
from tests.bench.interleaving import interleave
from tests.bench.results import Comparison, Results, Row
from tests.bench.stage import GPUS, progress
from tests.harness.runtime import OURS, STOCK, Runtime
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from integration.containerd import PrivateContainerd
    from tests.bench.stage import Stage

# By the key of a row: its title, and the row that it is compared with.
_WITH_RUNC: Final = {
    "stock": ("containerd-shim-runc-v2", None),
    "again": ("the same again (the noise)", "stock"),
    "ours": ("containerd-shim-nvidia-v1", "stock"),
    "cold": ("the same, the first on a node", "stock"),
    "stock-glibc": ("containerd-shim-runc-v2, image with glibc", None),
    "ours-glibc": ("containerd-shim-nvidia-v1, image with glibc", "stock-glibc"),
    "gpus": ("the same with two GPUs, all capabilities", "stock-glibc"),
    "gpus-cold": ("the same, the first on a node", "stock-glibc"),
}
_WITH_CRUN: Final = {
    "stock-glibc": ("containerd-shim-runc-v2, image with glibc", None),
    "again": ("the same again (the noise)", "stock-glibc"),
    "ours-glibc": ("containerd-shim-nvidia-v1, image with glibc", "stock-glibc"),
    "gpus": ("the same with two GPUs, all capabilities", "stock-glibc"),
}


def measure_runs(stage: Stage) -> Results:
    """With runc, a warm and a cold node in turn."""
    stock, ours = (Runtime(stage.warm, runtime) for runtime in (STOCK, OURS))
    cold = Runtime(stage.cold, OURS)
    cases = {
        "stock": once(stock, BUSYBOX),
        "again": once(stock, BUSYBOX),
        "ours": once(ours, BUSYBOX),
        "cold": _as_first(cold, BUSYBOX),
        "stock-glibc": once(stock, GLIBC),
        "ours-glibc": once(ours, GLIBC),
        "gpus": once(ours, GLIBC, GPUS),
        "gpus-cold": _as_first(cold, GLIBC, GPUS),
    }
    return _compared("runs", "`ctr run --rm` of `true`", _WITH_RUNC, cases, stage.sizes.rounds)


def measure_runs_with_crun(stage: Stage) -> Results:
    """With crun, on a warm node."""
    crun = stage.for_crun.parts.crun
    stock, ours = (Runtime(stage.for_crun, runtime, crun) for runtime in (STOCK, OURS))
    cases = {
        "stock-glibc": once(stock, GLIBC),
        "again": once(stock, GLIBC),
        "ours-glibc": once(ours, GLIBC),
        "gpus": once(ours, GLIBC, GPUS),
    }
    title = "`ctr run --rm` of `true` with crun"
    return _compared("crun", title, _WITH_CRUN, cases, stage.sizes.rounds)


def once(runtime: Runtime, image: str, flags: tuple[str, ...] = ()) -> Callable[[], float]:
    """What runs one container to its end, and returns the milliseconds that it took.

    Args:
        runtime: who runs it.
        image: of which image it is.
        flags: of ``ctr run``.
    """

    def run() -> float:
        begin = time.perf_counter()
        done = runtime.run("true", image=image, flags=flags)
        milliseconds = (time.perf_counter() - begin) * 1000
        if done.code != 0:
            raise RuntimeError(f"a container failed: {done.stderr}")
        return milliseconds

    return run


def end_fork_server(containerd: PrivateContainerd) -> None:
    """End the fork server that a cold start leaves behind, once it is there."""
    eventually(lambda: traces.fork_servers(containerd.marks), "a fork server is there")
    containerd.end_fork_servers()


def _as_first(runtime: Runtime, image: str, flags: tuple[str, ...] = ()) -> Callable[[], float]:
    """The same on a node without a fork server; the one that it leaves is ended."""
    run = once(runtime, image, flags)

    def cold() -> float:
        milliseconds = run()
        end_fork_server(runtime.containerd)
        return milliseconds

    return cold


def _compared(
    key: str,
    title: str,
    rows: Mapping[str, tuple[str, str | None]],
    cases: Mapping[str, Callable[[], float]],
    rounds: int,
) -> Results:
    measured = interleave(cases, rounds=rounds, tell=progress(title, rounds))
    comparison = Comparison(
        title,
        "ms",
        {name: Row(what, measured[name].values, base) for name, (what, base) in rows.items()},
    )
    return Results(comparisons={key: comparison})
