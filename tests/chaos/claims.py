"""``python -m tests.chaos.claims``: 8 GPUs of 7 MIG devices each, and 100 pods in a minute.

The run first measures how long a prepare takes without faults. Then pods come and go in parallel
while the agent is killed, the API server is unreachable and slices are deleted. Finally the agent
is killed at every step of preparing and unpreparing a claim, alone and while another agent waits to
take over. No device is allocated twice, and nothing is left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import grpc  # type: ignore[import-untyped] # it ships no types

from integration.node.options import DRA_DRIVER
from tests.harness.claim_storm import Storm
from tests.harness.dra_node import Place, dra_node
from tests.harness.killing import killed_at
from tests.harness.node_agent import NodeAgent
from tests.harness.processes import processor_time
from tests.harness.waiting import eventually

_GPUS: Final = 8
_PARTS: Final = 7
_TIMED: Final = 200
_PODS: Final = 100
_THREADS: Final = 10
_MINUTE: Final = 60.0
# One system call after the other: each of a thread's is counted apart.
_STEPS: Final = {
    "prepare": ("rename", "openat", "write", "fsync", "sendmsg"),
    "unprepare": ("unlink", "rename", "openat", "write", "fsync", "sendmsg"),
}
_MOST_STEPS: Final = 12


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def left(place: Place) -> list[Any]:
    """Return what is left of claims that no pod has."""
    with open(f"{place.node.state}/dra.json", encoding="utf-8") as file:
        claims: list[Any] = json.load(file)["claims"]
    return claims + [each for each in os.listdir(place.cdi) if DRA_DRIVER in each]


def measure(place: Place) -> None:
    """Measure how long prepares take, one after the other."""
    seconds, connections = [], place.cluster.connections
    before = processor_time(place.agent.pid)
    for number in range(_TIMED):
        claim = place.claim(f"timed-{number}", place.parts[number % len(place.parts)])
        begun = time.perf_counter()
        answer = place.driver.prepare(claim)[claim[1]]
        seconds.append(time.perf_counter() - begun)
        assert not answer.error, answer.error
        assert place.driver.unprepare(claim) == {claim[1]: ""}
    spent = (processor_time(place.agent.pid) - before) / _TIMED
    hundredths = statistics.quantiles(seconds, n=100)
    _say(
        f"prepare: p50 {hundredths[49] * 1000:.1f} ms, p99 {hundredths[98] * 1000:.1f} ms; "
        f"with unprepare {spent * 1000:.1f} ms of processor time; "
        f"{place.cluster.connections - connections} connections to the API server for {_TIMED}"
    )


def storm(place: Place) -> None:
    """Run a hundred pods in a minute, with all kinds of faults."""
    pods = Storm(place, [*place.parts])
    threads = [
        threading.Thread(target=pods.pods, args=(number, _PODS // _THREADS))
        for number in range(_THREADS)
    ]
    begun = time.monotonic()
    for thread in threads:
        thread.start()

    def away() -> None:
        place.cluster.refuse = lambda *_: 503

    for trouble in (place.cluster.wipe, place.cluster.forget, place.cluster.close_watches, away):
        eventually(partial(pods.is_past, pods.prepared + 5), "some more are prepared", timeout=60)
        place.agent.kill()
        trouble()
        place.start_again()
    place.cluster.refuse = lambda *_: None
    for thread in threads:
        thread.join()
    took = time.monotonic() - begun
    assert pods.failed == [], pods.failed
    assert pods.twice == [], pods.twice
    assert left(place) == [], left(place)
    place.published(len(place.parts))
    _say(f"storm: {_PODS} pods in {took:.0f} s, {pods.prepared} prepared, none twice, none left")
    assert took < _MINUTE, "it is to take less than a minute"


def steps(place: Place, what: str) -> None:
    """Kill the agent at every step of preparing or unpreparing a claim."""
    killed = 0
    for calls in _STEPS[what]:
        for nth in range(1, _MOST_STEPS):
            if not step(place, what, calls, nth):
                break
            killed += 1
    _say(f"{what}: killed at each of {killed} steps, nothing left")


def step(place: Place, what: str, calls: str, nth: int) -> bool:
    """Kill the agent at one step; return whether it reached the step."""
    claim = place.claim(f"{what}-{calls}-{nth}", place.parts[0])
    call = place.driver.prepare if what == "prepare" else place.driver.unprepare
    if what == "unprepare":
        assert not place.driver.prepare(claim)[claim[1]].error
    is_killed = True
    with killed_at(place.agent.pid, calls, nth=nth), suppress(grpc.RpcError, ValueError):
        call(claim)
        is_killed = not place.agent.is_running()
    place.agent.kill()  # it may just be ending
    place.start_again()
    if what == "prepare":
        answer = place.driver.prepare(claim)[claim[1]]
        assert not answer.error, answer.error
        assert os.path.exists(place.spec(claim))
    assert place.driver.unprepare(claim) == {claim[1]: ""}
    assert left(place) == [], (what, calls, nth, left(place))
    return is_killed


def handovers(place: Place) -> None:
    """Kill the agent at each step of a call, while the next one waits: no call fails."""
    place.agent.kill()
    agents = [_next(place)]  # no other agent runs, so it takes over immediately
    killed = 0
    try:
        for what, calls in ((what, each) for what, names in _STEPS.items() for each in names):
            for nth in range(1, _MOST_STEPS):
                agents.append(_next(place))
                is_killed = handover(place, agents.pop(0), what, calls, nth)
                killed += is_killed
                if not is_killed:
                    break
    finally:
        for agent in agents:
            agent.kill()
    _say(f"handovers: killed at each of {killed} steps, no call failed, nothing left")


def _next(place: Place) -> NodeAgent:
    """Start an agent that waits to take over, and return it once the kubelet calls it."""
    before = {each.info.endpoint for each in place.kubelet.instances(DRA_DRIVER)}
    agent = place.new_agent("--pod-uid", str(uuid.uuid4()), log="next.log")
    agent.start()
    eventually(lambda: place.driver.info.endpoint not in before, "the next one is registered")
    return agent


def handover(place: Place, agent: NodeAgent, what: str, calls: str, nth: int) -> bool:
    """Kill an agent at one step while another waits; return whether it reached the step."""
    claim, driver = place.claim(f"next-{what}-{calls}-{nth}", place.parts[0]), place.driver
    if what == "unprepare":
        assert not driver.prepare(claim)[claim[1]].error
    with killed_at(agent.pid, calls, nth=nth):
        if what == "prepare":
            answer = driver.prepare(claim)[claim[1]]
            assert not answer.error, answer.error
        else:
            assert driver.unprepare(claim) == {claim[1]: ""}
        is_killed = not agent.is_running()
        agent.kill()
    if what == "prepare":
        assert os.path.exists(place.spec(claim))
        assert driver.unprepare(claim) == {claim[1]: ""}
    else:
        again = place.claim("again", place.parts[0])
        assert not driver.prepare(again)[again[1]].error
        assert driver.unprepare(again) == {again[1]: ""}
    assert left(place) == [], (what, calls, nth, left(place))
    return is_killed


def main() -> int:
    """Run all trials."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.claims", description=__doc__)
    parts: dict[str, Callable[[Place], None]] = {
        "measure": measure,
        "storm": storm,
        "prepare": partial(steps, what="prepare"),
        "unprepare": partial(steps, what="unprepare"),
        "handovers": handovers,
    }
    parser.add_argument("--only", action="append", choices=parts, default=[])
    given = parser.parse_args()
    gpus = [{"index": n, "mig": ["1g.5gb"] * _PARTS} for n in range(_GPUS)]
    scenario = {"gpus": _GPUS, "model": "a100", "gpu": gpus}
    with (
        tempfile.TemporaryDirectory(prefix="claims-") as directory,
        tempfile.TemporaryDirectory(prefix="kubelet-") as root,
        dra_node(directory, root, scenario, devices=_GPUS * _PARTS) as place,
        suppress(KeyboardInterrupt),
    ):
        for name, part in parts.items():
            if not given.only or name in given.only:
                part(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
