"""How long it takes from ``start`` to the first answered call of a shim.

The verb is called as containerd calls it, in a bundle; then Connect is called over ttrpc.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tests.bench.interleaving import Series, interleave
from tests.bench.results import Comparison, Results, Row
from tests.bench.rpc import CallFailed, Shim
from tests.bench.runs import end_fork_server
from tests.bench.stage import progress
from tests.harness.runtime import STOCK, Runtime, is_alive, new_name
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from integration.containerd import PrivateContainerd
    from tests.bench.stage import Stage

_ROWS: Final = {
    "stock": ("containerd-shim-runc-v2", None),
    "again": ("the same again (the noise)", "stock"),
    "ours": ("containerd-shim-nvidia-v1", "stock"),
    "cold": ("the same, the first on a node", "stock"),
}


@dataclass(frozen=True, slots=True)
class Start:
    """One start.

    Attributes:
        verb: milliseconds until ``start`` had answered and ended.
        answered: milliseconds until the first call was answered.
    """

    verb: float
    answered: float


def measure_starts(stage: Stage) -> Results:
    """The verb, and the first answer; warm and cold."""
    rounds = stage.sizes.rounds
    spec = Runtime(stage.warm, STOCK).spec("true")
    starts: dict[str, list[Start]] = {name: [] for name in _ROWS}

    def start(name: str, containerd: PrivateContainerd, program: str) -> Callable[[], float]:
        def once() -> float:
            starts[name].append(measure_start(containerd, program, spec))
            if name == "cold":
                end_fork_server(containerd)
            return starts[name][-1].answered

        return once

    stock = stage.warm.parts.shim
    cases = {
        "stock": start("stock", stage.warm, stock),
        "again": start("again", stage.warm, stock),
        "ours": start("ours", stage.warm, stage.launcher),
        "cold": start("cold", stage.cold, stage.launcher),
    }
    answers = interleave(cases, rounds=rounds, tell=progress("start to first call", rounds))
    verbs = {
        name: Series(tuple(each.verb for each in all_[-rounds:])) for name, all_ in starts.items()
    }
    return Results(
        comparisons={
            "start": _comparison("the verb `start`", verbs),
            "first-call": _comparison("from `start` to the first answered call", answers),
        }
    )


def measure_start(containerd: PrivateContainerd, program: str, spec: dict[str, Any]) -> Start:
    """Start a shim by hand, call it once, and let it end.

    Args:
        containerd: the one that the shim believes to belong to.
        program: the shim's path.
        spec: what config.json holds.
    """
    name = new_name("start")
    with tempfile.TemporaryDirectory(prefix="nvshim-bench-") as bundle:
        with open(os.path.join(bundle, "config.json"), "w", encoding="utf-8") as file:
            json.dump(spec, file)
        log = os.path.join(bundle, "log")
        os.mkfifo(log, 0o700)
        # containerd holds it open in both directions, so that no shim waits for a reader.
        reader = os.open(log, os.O_RDWR | os.O_NONBLOCK)
        try:
            return _start(containerd, program, name, bundle)
        finally:
            os.close(reader)


def _start(containerd: PrivateContainerd, program: str, name: str, bundle: str) -> Start:
    argv = [
        program, "-namespace", containerd.namespace, "-address", containerd.address,
        "-publish-binary", containerd.parts.containerd, "-id", name, "start",
    ]  # fmt: skip
    environment = {"PATH": containerd.path, "TTRPC_ADDRESS": containerd.ttrpc_address}
    # By its name, for the sweep at the end, should this not get to Shutdown.
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
            pass  # containerd's own shim ends before it has answered
    eventually(lambda: not is_alive(pid), "the shim ends")
    return Start(verb * 1000, answered * 1000)


def _comparison(title: str, measured: dict[str, Series]) -> Comparison:
    rows = {name: Row(what, measured[name].values, base) for name, (what, base) in _ROWS.items()}
    return Comparison(title, "ms", rows)
