"""Requests to a running container: execs, output, repeated calls; and its exit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

from api.proto import task_pb2
from tests.bench.comparing import beside_stock, compare
from tests.bench.rpc import Shim
from tests.harness.events import Recorder
from tests.harness.runtime import OURS, STOCK, Runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.bench.results import Results
    from tests.bench.stage import Stage
    from tests.harness.runtime import Container

_MEGABYTES: Final = 1000
_CALLS: Final = 500
_LATE: Final = 30.0
_POLL: Final = 0.0005


def measure_execs(stage: Stage) -> Results:
    """Measure ``ctr tasks exec`` of ``true`` in a running container, also on a busy machine."""
    title = "`ctr tasks exec` of `true`"
    alone = _in_idle("exec", title, "ms", stage, stage.sizes.rounds, _execs)
    with _busy_processors():
        busy = f"{title}, all processors busy"
        return alone.joined(_in_idle("exec-busy", busy, "ms", stage, stage.sizes.rounds, _execs))


@contextmanager
def _busy_processors() -> Iterator[None]:
    """Run a process that never waits for each processor."""
    argv = [sys.executable, "-c", "while True: pass"]
    with ExitStack() as stack:
        for _ in os.sched_getaffinity(0):
            process = stack.enter_context(subprocess.Popen(argv))
            stack.callback(process.kill)
        yield


def measure_calls(stage: Stage) -> Results:
    """Measure State and Connect, one call after another."""
    few = max(4, stage.sizes.rounds // 3)
    state = _in_idle("state", "`State`, calls a second", "", stage, few, _calls("State"))
    connect = _in_idle("connect", "`Connect`, calls a second", "", stage, few, _calls("Connect"))
    return state.joined(connect)


def measure_output(stage: Stage) -> Results:
    """Measure a container that writes a gigabyte to stdout."""
    few = max(3, stage.sizes.rounds // 6)
    runtimes = [Runtime(stage.warm, name) for name in (STOCK, OURS)]
    cases = beside_stock(*map(_output, runtimes))
    return compare("output", "a gigabyte to stdout", cases, few, unit="MB/s")


def measure_exits(stage: Stage) -> Results:
    """Measure from the exit of a detached container without a reader to containerd's event."""
    runtimes = [Runtime(stage.warm, name) for name in (STOCK, OURS)]
    cases = beside_stock(*map(_exit, runtimes))
    title = "from the end to the exit event, output unread"
    return compare("exit", title, cases, stage.sizes.rounds)


def _in_idle(
    key: str,
    title: str,
    unit: str,
    stage: Stage,
    rounds: int,
    measure: Callable[[Container], Callable[[], float]],
) -> Results:
    """Measure in a container of each shim that does nothing else."""
    runtimes = [Runtime(stage.warm, name) for name in (STOCK, OURS)]
    try:
        idle = [runtime.start_idle(flags=("--null-io",)) for runtime in runtimes]
        return compare(key, title, beside_stock(*map(measure, idle)), rounds, unit=unit)
    finally:
        for runtime in runtimes:
            runtime.close()


def _execs(container: Container) -> Callable[[], float]:
    def once() -> float:
        begin = time.perf_counter()
        done = container.exec("true")
        milliseconds = (time.perf_counter() - begin) * 1000
        if done.code != 0:
            raise RuntimeError(f"an exec failed: {done.stderr}")
        return milliseconds

    return once


def _output(runtime: Runtime) -> Callable[[], float]:
    command = ("dd", "if=/dev/zero", "bs=64k", f"count={_MEGABYTES * 1000 * 1000 // 65536}")

    def once() -> float:
        container, ctr = runtime.spawn(
            *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        begin = time.perf_counter()
        code = ctr.wait()
        seconds = time.perf_counter() - begin
        if code != 0:
            raise RuntimeError(f"{container.name} ended with {code}")
        return _MEGABYTES / seconds

    return once


def _exit(runtime: Runtime) -> Callable[[], float]:
    def once() -> float:
        with Recorder(runtime.containerd) as recorder:
            # It prints only after its client, the reader, has disconnected.
            container = runtime.start("sh", "-c", "sleep 0.3; echo said; exec tail -f /dev/null")
            pid = container.wait_for_program("tail")
            begin = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            while not any(event.short == "exit" for event in recorder.of(container.name)):
                if time.perf_counter() - begin > _LATE:
                    raise RuntimeError(f"{container.name} has ended, and there is no event of it")
                time.sleep(_POLL)
            milliseconds = (time.perf_counter() - begin) * 1000
        container.remove()
        return milliseconds

    return once


def _calls(method: str) -> Callable[[Container], Callable[[], float]]:
    def of(container: Container) -> Callable[[], float]:
        described = task_pb2.DESCRIPTOR.services_by_name["Task"].methods_by_name[method]
        kind = getattr(task_pb2, described.input_type.name)
        request = kind(id=container.name).SerializeToString()

        def once() -> float:
            with Shim.of(container) as shim:
                begin = time.perf_counter()
                for _ in range(_CALLS):
                    shim.exchange(method, request)
                return _CALLS / (time.perf_counter() - begin)

        return once

    return of
