"""The cost of a resource claim: how long its pod waits, and what the node agent uses.

The agent is the real process on a simulated node with 8 GPUs of 7 MIG devices each. The kubelet and
the API server are those of the tests, in this process, so a call takes a little longer than what a
kubelet sees. Claims are prepared and unprepared one after another. Wake-ups are how often a thread
of the agent has waited for something.

Source: proc(5), /proc/PID/stat, /proc/PID/task/TID/status, /proc/PID/smaps_rollup.
"""

from __future__ import annotations

import io
import os
import statistics
import tempfile
import time
from contextlib import ExitStack, redirect_stderr, suppress
from typing import TYPE_CHECKING, Final

from tests.bench.results import Figure, Figures, Results
from tests.bench.stage import say
from tests.harness.dra_node import Place, dra_node
from tests.harness.processes import processor_time, rss_and_pss
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.bench.stage import Stage

__all__ = ["KEY", "measure_claims"]

KEY: Final = "claims"

_GPUS, _PARTS = 8, 7
_CLAIMS: Final = 500
_FIRST: Final = 20  # these do not count
_HELD: Final = 100
_SETTLE: Final = 6.0

_COLUMNS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "plugin": ("with the device plugin", ()),
    "alone": ("without it", ("--device-plugin", "no")),
}
_ROWS: Final = {
    "prepare-p50": ("NodePrepareResources, median", "ms"),
    "prepare-p99": ("NodePrepareResources, 99 of 100", "ms"),
    "unprepare-p50": ("NodeUnprepareResources, median", "ms"),
    "unprepare-p99": ("NodeUnprepareResources, 99 of 100", "ms"),
    "processor": ("processor time of both", "ms"),
    "wake-ups": ("wake-ups for both", ""),
    "lists": ("device lists that the kubelet receives for both", ""),
    "held-p50": ("NodePrepareResources with 100 claims, median", "ms"),
    "held-p99": ("NodePrepareResources with 100 claims, 99 of 100", "ms"),
    "held-processor": ("processor time of both with 100 claims", "ms"),
    "rss": ("memory (RSS) more by `--dra`, with 100 claims", "MB"),
    "pss": ("memory (PSS) more by `--dra`, with 100 claims", "MB"),
}


def measure_claims(stage: Stage) -> Results:
    """Measure claims with the device plugin, and without it."""
    found = {}
    for key, (title, flags) in _COLUMNS.items():
        say(f"resource claims: {title}")
        found[key] = _measure(f"{stage.directory}/claims-{key}", flags)
    rows = {
        name: Figure(title, unit, {key: values[name] for key, values in found.items()})
        for name, (title, unit) in _ROWS.items()
    }
    columns = {key: title for key, (title, _) in _COLUMNS.items()}
    return Results(figures={KEY: Figures("a resource claim", columns, None, rows)})


def _measure(directory: str, flags: tuple[str, ...]) -> dict[str, float]:
    os.makedirs(directory)
    cut = [{"index": n, "mig": ["1g.5gb"] * _PARTS} for n in range(_GPUS)]
    scenario = {"gpus": _GPUS, "model": "a100", "gpu": cut}
    with ExitStack() as stack:
        stack.enter_context(redirect_stderr(io.StringIO()))  # the agent's log, for tests that fail
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="kubelet-"))
        devices = _GPUS * _PARTS
        place = stack.enter_context(
            dra_node(directory, root, scenario, devices=devices, flags=flags)
        )
        none = _come_and_go(place, "first")
        hold(place, _HELD)
        many = _come_and_go(place, "later")
        time.sleep(_SETTLE)
        rss, pss = rss_and_pss(place.agent.pid)
        place.agent.stop()
        with place.new_agent(*flags, dra=False) as agent:
            eventually(lambda: agent.said("node inventory"), "it has looked")
            time.sleep(_SETTLE)
            rss_without, pss_without = rss_and_pss(agent.pid)
    return {
        **none,
        "held-processor": many["processor"],
        "held-p50": many["prepare-p50"],
        "held-p99": many["prepare-p99"],
        "rss": (rss - rss_without) / 1024,
        "pss": (pss - pss_without) / 1024,
    }


def hold(place: Place, count: int) -> None:
    """Prepare ``count`` claims with admin access, so that several can have the same device."""
    for number in range(count):
        device = place.parts[number % len(place.parts)]
        result = place.result(device, request="gpu", adminAccess=True)
        uid = place.cluster.claim(f"held-{number}", [result])
        answer = place.driver.prepare(("default", uid, f"held-{number}"))[uid]
        assert not answer.error, answer.error


def _come_and_go(place: Place, name: str) -> dict[str, float]:
    """Measure claims, one after another."""
    pid = place.agent.pid
    claims = [
        place.claim(f"{name}-{n}", place.parts[n % len(place.parts)])
        for n in range(_CLAIMS + _FIRST)
    ]
    prepared, taken_back = [], []
    spent = waits = lists = 0.0
    for number, claim in enumerate(claims):
        if number == _FIRST:
            spent, waits, lists = processor_time(pid), _waits(pid), _lists(place)
        began = time.perf_counter()
        answer = place.driver.prepare(claim)[claim[1]]
        there = time.perf_counter()
        assert not answer.error, answer.error
        assert place.driver.unprepare(claim) == {claim[1]: ""}
        if number >= _FIRST:
            prepared.append((there - began) * 1000)
            taken_back.append((time.perf_counter() - there) * 1000)
    return {
        "prepare-p50": statistics.median(prepared),
        "prepare-p99": statistics.quantiles(prepared, n=100)[98],
        "unprepare-p50": statistics.median(taken_back),
        "unprepare-p99": statistics.quantiles(taken_back, n=100)[98],
        "processor": (processor_time(pid) - spent) / _CLAIMS * 1000,
        "wake-ups": (_waits(pid) - waits) / _CLAIMS,
        "lists": (_lists(place) - lists) / _CLAIMS,
    }


def _waits(pid: int) -> int:
    """Return how often the threads of a process have waited for something."""
    found = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with (
            suppress(FileNotFoundError),
            open(f"/proc/{pid}/task/{thread}/status", encoding="ascii") as file,
        ):
            lines = [line for line in file if line.startswith("voluntary_ctxt_switches")]
            found += sum(int(line.split()[1]) for line in lines)
    return found


def _lists(place: Place) -> int:
    """Return how many device lists the kubelet's device manager received."""
    return sum(len(plugin.lists) for plugin in place.plugins.plugins.values())
