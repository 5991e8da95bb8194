"""The time from ``start`` to the first answered call of a shim.

The verb is called as containerd calls it, in a bundle; then Connect is called over ttrpc.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.bench.comparing import Case, beside_stock, compare, comparison
from tests.bench.interleaving import Series
from tests.bench.rpc import CallFailed, Shim
from tests.bench.runs import end_fork_server
from tests.harness.runtime import STOCK, Runtime, is_alive, new_name
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.bench.results import Results
    from tests.bench.stage import Stage
    from tools.containerd import PrivateContainerd


def measure_starts(stage: Stage) -> Results:
    """Measure the verb and the first answer, warm and cold."""
    rounds = stage.sizes.rounds
    spec = Runtime(stage.warm, STOCK).spec("true")
    verbs: dict[str, list[float]] = {}

    def case(name: str, containerd: PrivateContainerd, program: str) -> Callable[[], float]:
        def start() -> float:
            verb, answered = _start_once(containerd, program, spec)
            verbs.setdefault(name, []).append(verb)
            if name == "cold":
                end_fork_server(containerd)
            return answered

        return start

    stock = stage.warm.parts.shim
    cases = beside_stock(case("stock", stage.warm, stock), case("ours", stage.warm, stage.launcher))
    again = case("again", stage.warm, stock)
    cases["again"] = replace(cases["again"], measure=again)
    cold = case("cold", stage.cold, stage.launcher)
    cases["cold"] = Case("the same, the first on a node", cold)
    answers = compare("first-call", "from `start` to the first answered call", cases, rounds)
    counted = {name: Series(tuple(values[-rounds:])) for name, values in verbs.items()}
    return comparison("start", "the verb `start`", cases, counted).joined(answers)


def _start_once(
    containerd: PrivateContainerd, program: str, spec: dict[str, Any]
) -> tuple[float, float]:
    """Start a shim directly, call it once, and stop it.

    Args:
        containerd: the containerd that the shim is configured for.

    Returns:
        Milliseconds until ``start`` had answered and exited, and until the first call was answered.
    """
    name = new_name("start")
    with tempfile.TemporaryDirectory(prefix="nvshim-bench-") as bundle:
        with open(os.path.join(bundle, "config.json"), "w", encoding="utf-8") as file:
            json.dump(spec, file)
        log = os.path.join(bundle, "log")
        os.mkfifo(log, 0o700)
        # containerd opens it for reading and writing, so that no shim waits for a reader.
        reader = os.open(log, os.O_RDWR | os.O_NONBLOCK)
        try:
            return _start(containerd, program, name, bundle)
        finally:
            os.close(reader)


def _start(
    containerd: PrivateContainerd, program: str, name: str, bundle: str
) -> tuple[float, float]:
    argv = [
        program, "-namespace", containerd.namespace, "-address", containerd.address,
        "-publish-binary", containerd.parts.containerd, "-id", name, "start",
    ]  # fmt: skip
    environment = {"PATH": containerd.path, "TTRPC_ADDRESS": containerd.ttrpc_address}
    # The final sweep finds the shim by its name if Shutdown is not reached.
    containerd.know(name)
    begin = time.perf_counter()
    done = subprocess.run(
        argv, cwd=bundle, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=True
    )
    verb = time.perf_counter() - begin
    with Shim(done.stdout.decode()) as shim:
        pid = shim.call("Connect", id=name).shim_pid
        answered = time.perf_counter() - begin
        try:
            shim.call("Shutdown", id=name)
        except CallFailed:
            pass  # containerd's own shim exits before it has answered
    eventually(lambda: not is_alive(pid), "the shim exits")
    return verb * 1000, answered * 1000
