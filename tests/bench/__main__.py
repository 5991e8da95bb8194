"""``python -m tests.bench``: measure this shim next to containerd's own, on this machine.

It prints tables in Markdown: the targets, and all measurements, which it also writes to a JSON
file. ``--only runs,cpu`` measures a part. The GPU containers run on a simulated node whose driver
files are real, so discovery, mounts and writes are real, too.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tests.bench.agent import measure_agent
from tests.bench.charts import write_charts
from tests.bench.claims import measure_claims
from tests.bench.first_rpc import measure_starts
from tests.bench.footprint import measure_idle
from tests.bench.growth import measure_growth
from tests.bench.injection import measure_injection
from tests.bench.machine import describe
from tests.bench.pods import measure_pods
from tests.bench.report import report
from tests.bench.results import Results
from tests.bench.runs import (
    measure_processor,
    measure_runs,
    measure_runs_after_cdi,
    measure_runs_with_crun,
    measure_together,
)
from tests.bench.scaling import measure_scaling
from tests.bench.stage import Sizes, Stage, say
from tests.bench.work import measure_calls, measure_execs, measure_exits, measure_output
from tests.harness.launcher import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Callable

PARTS: Final[dict[str, Callable[[Stage], Results]]] = {
    "runs": measure_runs,
    "crun": measure_runs_with_crun,
    "cdi": measure_runs_after_cdi,
    "start": measure_starts,
    "cpu": measure_processor,
    "many": measure_together,
    "exec": measure_execs,
    "exit": measure_exits,
    "calls": measure_calls,
    "output": measure_output,
    "growth": measure_growth,
    "scaling": measure_scaling,
    "injection": measure_injection,
    "idle": measure_idle,
    "pods": measure_pods,
    "agent": measure_agent,
    "claims": measure_claims,
}
"""The parts of the benchmark, by their names for ``--only``, in the order in which they run."""

_USUAL: Final = Sizes(rounds=25, shims=100, many=(10, 30), execs=300, pods=40, watch=10)
_QUICK: Final = Sizes(rounds=5, shims=10, many=(10,), execs=50, pods=12, watch=5, idle=10)

# These parts have no targets, and take a third of the time.
_LONG: Final = ("output", "growth", "scaling", "injection")


def main() -> int:
    """Measure and print."""
    asked = _parse()
    if os.geteuid() != 0:
        say("bench: must be root")
        return 1
    began = time.monotonic()
    load = os.getloadavg()[0]
    results = Results()
    if asked.merge and os.path.exists(asked.json):
        results = Results.read(asked.json)
    sizes = _sizes(asked)
    try:
        with Stage(sizes) as stage:
            for part in asked.only or [part for part in PARTS if _is_usual(part, asked)]:
                before = time.monotonic()
                results = results.joined(PARTS[part](stage))
                say(f"{part}: {time.monotonic() - before:.0f} s")
                # Write now, because a later part may fail.
                results = results.joined(Results(describe(sizes.rounds, load)))
                results.write(asked.json)
    except KeyboardInterrupt:
        say("bench: interrupted; what was measured before is in " + asked.json)
        return 130
    sys.stdout.write(report(results))
    if asked.charts:
        write_charts(results, asked.charts)
    say(f"{time.monotonic() - began:.0f} s in all; every value is in {asked.json}")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", type=_parts, default=[], metavar="PART,…", help=", ".join(PARTS))
    parser.add_argument(
        "--quick", action="store_true", help=f"use small sizes, and skip {', '.join(_LONG)}"
    )
    parser.add_argument(
        "--rounds", type=int, help=f"rounds of each comparison (default: {_USUAL.rounds})"
    )
    parser.add_argument(
        "--shims", type=int, help=f"idle shims at the same time (default: {_USUAL.shims})"
    )
    parser.add_argument(
        "--execs", type=int, help=f"execs, to see what they leave (default: {_USUAL.execs})"
    )
    parser.add_argument(
        "--pods", type=int, help=f"pods on the node at once (default: {_USUAL.pods})"
    )
    parser.add_argument(
        "--watch", type=float, help=f"seconds to watch for wake-ups (default: {_USUAL.watch:g})"
    )
    parser.add_argument("--json", default=os.path.join(REPOSITORY, ".cache", "bench.json"))
    parser.add_argument("--charts", metavar="DIRECTORY", help="draw charts in this directory")
    parser.add_argument(
        "--merge", action="store_true", help="keep the other parts in the JSON file"
    )
    return parser.parse_args()


def _parts(text: str) -> list[str]:
    parts = text.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]}: none of {', '.join(PARTS)}")
    return parts


def _is_usual(part: str, asked: argparse.Namespace) -> bool:
    return not asked.quick or part not in _LONG


def _sizes(asked: argparse.Namespace) -> Sizes:
    usual = _QUICK if asked.quick else _USUAL
    given = {
        name: getattr(asked, name)
        for name in ("rounds", "shims", "execs", "pods", "watch")
        if getattr(asked, name) is not None
    }
    return replace(usual, **given)


if __name__ == "__main__":
    sys.exit(main())
