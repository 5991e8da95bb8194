"""The cost of ``ctr run --rm`` of ``true``: time, processor time, and many at the same time.

Warm, cold (the first container on a node), with GPUs, with crun, and after the engine's CDI.
"""

from __future__ import annotations

import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from integration.containers import traces
from tests.bench.comparing import Case, beside_stock, compare
from tests.bench.results import Results
from tests.bench.stage import GPUS
from tests.harness import api, engine_cdi
from tests.harness.runtime import OURS, STOCK, Runtime, new_name
from tests.harness.waiting import eventually
from tools.images import BUSYBOX, GLIBC

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.bench.processor import Meter
    from tests.bench.stage import Stage
    from tools.containerd import PrivateContainerd

_FIRST: Final = "the same, the first on a node"
_STOCK_WITH_GLIBC: Final = "containerd-shim-runc-v2, image with glibc"
_WITH_GPUS: Final = "the same with two GPUs, all capabilities"
_AFTER_CDI: Final = "the same, NVIDIA's CDI spec for two GPUs applied by the engine"
_HOOK: Final = "/usr/bin/nvidia-cdi-hook"  # need not exist: this shim does its work

# Spreads containerd's background work and the error of a reading over this many runs.
_BATCH: Final = 4


def measure_runs(stage: Stage) -> Results:
    """Measure with runc, on a warm and a cold node in turn."""
    stock, ours = (Runtime(stage.warm, runtime) for runtime in (STOCK, OURS))
    cold = Runtime(stage.cold, OURS)
    cases = {
        **beside_stock(once(stock, BUSYBOX), once(ours, BUSYBOX)),
        "cold": Case(_FIRST, _as_first(cold, BUSYBOX)),
        **_with_glibc(stock, ours),
        "gpus-cold": Case(_FIRST, _as_first(cold, GLIBC, GPUS), "stock-glibc"),
    }
    return compare("runs", "`ctr run --rm` of `true`", cases, stage.sizes.rounds)


def measure_runs_after_cdi(stage: Stage) -> Results:
    """Measure containers whose engine has applied a CDI spec as NVIDIA's tool writes it.

    ``ctr`` of containerd 1.6 applies none, so the spec is edited between the two halves of
    ``ctr run --rm``, of which the second is measured.
    """
    stock, ours = (_task(Runtime(stage.warm, runtime)) for runtime in (STOCK, OURS))
    apply = partial(engine_cdi.apply, node=stage.node, program=_HOOK)
    cases = {
        **beside_stock(stock, ours),
        "cdi": Case(_AFTER_CDI, _task(Runtime(stage.warm, OURS), apply)),
    }
    return compare("cdi", "`ctr tasks start` of `true`", cases, stage.sizes.rounds)


def measure_runs_with_crun(stage: Stage) -> Results:
    """Measure with crun, on a warm node."""
    crun = stage.for_crun.parts.crun
    stock, ours = (Runtime(stage.for_crun, runtime, crun) for runtime in (STOCK, OURS))
    base, *others = _with_glibc(stock, ours).items()
    again = Case("the same again (the noise)", once(stock, GLIBC), "stock-glibc")
    cases = dict((base, ("again", again), *others))
    return compare("crun", "`ctr run --rm` of `true` with crun", cases, stage.sizes.rounds)


def measure_processor(stage: Stage) -> Results:
    """Measure the processor time of a container's whole life, without the client's."""
    meter = stage.metered
    stock, ours = (Runtime(meter.containerd, runtime) for runtime in (STOCK, OURS))
    cases = {
        **beside_stock(_metered(meter, once(stock, GLIBC)), _metered(meter, once(ours, GLIBC))),
        "gpus": Case(_WITH_GPUS, _metered(meter, once(ours, GLIBC, GPUS))),
    }
    return compare("cpu", "processor time of a container's life", cases, stage.sizes.rounds)


def measure_together(stage: Stage) -> Results:
    """Measure ten at once, thirty at once …, as configured."""
    stock, ours = Runtime(stage.warm, STOCK), Runtime(stage.warm, OURS)
    rounds = max(4, stage.sizes.rounds // 2)
    results = Results()
    for count in stage.sizes.many:
        cases = beside_stock(_together(stock, count), _together(ours, count)) | {
            "stock-glibc": Case(_STOCK_WITH_GLIBC, _together(stock, count, GLIBC), None),
            "gpus": Case(_WITH_GPUS, _together(ours, count, GLIBC, GPUS), "stock-glibc"),
        }
        del cases["again"]
        title = f"{count} `ctr run --rm` at once"
        results = results.joined(compare(f"at-once-{count}", title, cases, rounds))
    return results


def once(runtime: Runtime, image: str, flags: tuple[str, ...] = ()) -> Callable[[], float]:
    """Return a function that runs one container to its end, and returns the milliseconds.

    Args:
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


def _task(
    runtime: Runtime, edit: Callable[[dict[str, Any]], object] = lambda _: None
) -> Callable[[], float]:
    """Return a function that runs the task of a new container, and returns the milliseconds.

    Args:
        edit: changes the container's spec before that.
    """

    def run() -> float:
        name = new_name()
        runtime.create_with_image(name, "true", image=GLIBC)
        try:
            api.edit_spec(runtime.containerd, name, edit)
            begin = time.perf_counter()
            runtime.containerd.ctr(
                "tasks", "start", "--fifo-dir", runtime.containerd.fifo_directory, name
            )
            return (time.perf_counter() - begin) * 1000
        finally:
            api.remove_container(runtime.containerd, name)

    return run


def end_fork_server(containerd: PrivateContainerd) -> None:
    """Stop the fork server that a cold start leaves running, once it exists."""
    eventually(lambda: traces.fork_servers(containerd.marks), "a fork server is there")
    containerd.end_fork_servers()


def _with_glibc(stock: Runtime, ours: Runtime) -> dict[str, Case]:
    """Return the cases of a glibc image: containerd's own shim, this one without and with GPUs."""
    base = "stock-glibc"
    return {
        base: Case(_STOCK_WITH_GLIBC, once(stock, GLIBC), None),
        "ours-glibc": Case("containerd-shim-nvidia-v1, image with glibc", once(ours, GLIBC), base),
        "gpus": Case(_WITH_GPUS, once(ours, GLIBC, GPUS), base),
    }


def _as_first(runtime: Runtime, image: str, flags: tuple[str, ...] = ()) -> Callable[[], float]:
    """Return the same on a node without a fork server; stop the one that it leaves."""
    run = once(runtime, image, flags)

    def cold() -> float:
        milliseconds = run()
        end_fork_server(runtime.containerd)
        return milliseconds

    return cold


def _metered(meter: Meter, run: Callable[[], float]) -> Callable[[], float]:
    """Return a function that runs containers, and returns processor milliseconds for each."""

    def measure() -> float:
        meter.settle()
        before = meter.read()
        for _ in range(_BATCH):
            run()
        meter.settle()
        return (meter.read() - before) * 1000 / _BATCH

    return measure


def _together(
    runtime: Runtime, count: int, image: str = BUSYBOX, flags: tuple[str, ...] = ()
) -> Callable[[], float]:
    """Return a function that runs containers at the same time; it returns milliseconds for all."""

    def measure() -> float:
        begin = time.perf_counter()
        # Do not read their output while they run: that would be measured, too.
        running = [
            runtime.containerd.spawn_ctr(
                *runtime.words("true", image=image, flags=("--rm", *flags)),
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

    return measure
