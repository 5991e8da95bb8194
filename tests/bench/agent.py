"""The cost of the node agent: how fast it answers a kubelet, and what it uses while idle.

The agent is the real process, ``nvshim node``, on a simulated node. The kubelet's side is
:mod:`tests.harness.kubelet_plugins`, in this process. So a call takes what a kubelet sees, and a
little more, because this client is in Python, too. Figures of calls are of a round of 200, and
then the median of the rounds, because other programs may slow down the machine for a while.

The agent starts from compiled modules, like an installed one: it was started once before.

There are two nodes: one with two GPUs, and the largest possible one: 16 GPUs with 7 MIG devices
each, and 48 shares of each MIG device.

Source: proc(5), /proc/PID/stat, /proc/PID/smaps_rollup, /proc/PID/task/TID/children.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from glob import glob
from typing import TYPE_CHECKING, Final

from integration.containers.memory import pss_and_uss
from integration.simulated import Scenario, SimulatedNode
from tests.bench.results import Figure, Figures, Results
from tests.bench.stage import say
from tests.harness.kubelet_plugins import KubeletPlugins
from tests.harness.processes import end, family
from tests.harness.waiting import eventually
from tools.nodes import changed_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.bench.stage import Stage

__all__ = ["KEY", "measure_agent"]

KEY: Final = "agent"

# The driver reports an XID as an event; this XID is a GPU fault that no program causes.
_XID: Final = 79
_EVENT: Final = f"0 8 {_XID}\n"
_PATIENCE: Final = 60.0
_SETTLE: Final = 3.0
_CALLS: Final = 200  # in each round
_FIRST: Final = 10  # these do not count


@dataclass(frozen=True, slots=True)
class Case:
    """A node, and the list that its kubelet receives."""

    title: str  # heading of its column
    scenario: Scenario  # what the node has
    changed: Scenario  # the same with a GPU or MIG device less
    config: str  # the device plugin's configuration
    resource: str  # the resource that is allocated
    devices: int  # how many it has
    fewer: int  # how many it has when the node has changed


def _divided(gpus: int, parts: int) -> Scenario:
    """Return a scenario with ``gpus`` GPUs and ``parts`` MIG devices each."""
    tables = [{"index": index, "mig": ["1g.10gb"] * parts} for index in range(gpus)]
    return Scenario.parse({"gpus": gpus, "model": "h100", "gpu": tables})


def _cases() -> dict[str, Case]:
    two = Scenario.load("two")
    large = _divided(16, 7)
    last = large.gpus[-1]
    assert last.mig is not None
    fewer = replace(large, gpus=(*large.gpus[:-1], replace(last, mig=last.mig[:-1])))
    shared = "nvidia.com/mig-1g.10gb"
    return {
        "two": Case("2 GPUs", two, replace(two, gpus=two.gpus[:1]), "version: v1\n",
                    "nvidia.com/gpu", 2, 1),
        "large": Case(
            "16 GPUs of 7 MIG devices, 48 shares", large, fewer,
            "version: v1\nflags: {migStrategy: mixed}\nsharing: {timeSlicing: {resources: "
            f"[{{name: {shared}, replicas: 48}}]}}}}\n",
            shared, 16 * 7 * 48, (16 * 7 - 1) * 48,
        ),
    }  # fmt: skip


def measure_agent(stage: Stage) -> Results:
    """Measure the agent on each node."""
    cases = _cases()
    found: dict[str, dict[str, float]] = {}
    for key, case in cases.items():
        say(f"the node agent: {case.title}")
        found[key] = _measure(stage, key, case)
    found["nvidia"] = _RECORDED
    rows = {
        name: Figure(title, unit, {key: row[name] for key, row in found.items() if name in row})
        for name, (title, unit) in _ROWS.items()
    }
    columns = {key: case.title for key, case in cases.items()} | {"nvidia": _NVIDIAS}
    return Results(figures={KEY: Figures("the node agent", columns, None, rows)})


_ROWS: Final = {
    "begin": ("start, until the kubelet has the list", "s"),
    "allocate-p50": ("Allocate, median", "ms"),
    "allocate-p99": ("Allocate, 99 of 100", "ms"),
    "preferred-p50": ("GetPreferredAllocation of 4, median", "ms"),
    "preferred-p99": ("GetPreferredAllocation of 4, 99 of 100", "ms"),
    "unhealthy": ("an XID, until the kubelet knows", "s"),
    "changed": ("a device goes, until the kubelet knows", "s"),
    "idle": ("processor while idle", "%"),
    "wakeups": ("wake-ups a second while idle", ""),
    "pss": ("PSS, the agent and its children", "MB"),
    "uss": ("USS of them", "MB"),
    "processes": ("processes", ""),
}


_NVIDIAS: Final = "NVIDIA's plugin and GFD, 8 GPUs, recorded in 2026-11"
# Of NVIDIA's device plugin and GPU feature discovery, on a simulated node of another machine. They
# are in no registry of packages, so they do not run here, and there is no ratio to them.
_RECORDED: Final = {"begin": 0.04, "unhealthy": 0.002, "wakeups": 0.6, "pss": 46.0}


def _measure(stage: Stage, key: str, case: Case) -> dict[str, float]:
    directory = f"{stage.directory}/agent-{key}"
    os.makedirs(directory)
    with SimulatedNode.create(f"{directory}/node", case.scenario, say=say) as node:
        with open(node.config_path, "a", encoding="utf-8") as file:
            file.write(f'\n[cdi]\nspec-dirs = ["{directory}/cdi"]\n')
        config = f"{directory}/plugin.yaml"
        with open(config, "w", encoding="utf-8") as file:
            file.write(case.config)
        sockets = f"{directory}/kubelet"
        with KubeletPlugins(sockets, pod_resources=f"{directory}/pods/kubelet.sock") as kubelet:
            bytecode = f"{stage.directory}/bytecode"
            with _agent(node, directory, config, kubelet, bytecode):
                kubelet.wait_for(case.resource, case.devices, timeout=_PATIENCE)
            eventually(lambda: not kubelet.healthy(case.resource), "the kubelet knows of its end")
            began = time.monotonic()
            with _agent(node, directory, config, kubelet, bytecode) as pid:
                kubelet.wait_for(case.resource, case.devices, timeout=_PATIENCE)
                begin = time.monotonic() - began
                time.sleep(_SETTLE)
                idle, wakeups = _idle(pid, stage.sizes.idle)
                plugin = kubelet.plugins[case.resource]
                ids = sorted(plugin.devices)
                rounds = range(stage.sizes.rounds)
                allocate = [_times(lambda: plugin.allocate(random.choice(ids))) for _ in rounds]
                size = min(4, len(ids))
                preferred = [_times(lambda: plugin.preferred(ids, size)) for _ in rounds]
                memory = [pss_and_uss(each) for each in family(pid)]
                _tell(node)
                known = _delay(lambda: len(kubelet.healthy(case.resource)) < case.devices)
                _change(node, case.changed, pid)
                changed = _delay(lambda: len(kubelet.devices(case.resource)) == case.fewer)
    return {
        "begin": begin,
        "allocate-p50": _of(allocate, 0.5),
        "allocate-p99": _of(allocate, 0.99),
        "preferred-p50": _of(preferred, 0.5),
        "preferred-p99": _of(preferred, 0.99),
        "unhealthy": known,
        "changed": changed,
        "idle": idle,
        "wakeups": wakeups,
        "pss": sum(pss for pss, _ in memory) / 1024,
        "uss": sum(uss for _, uss in memory) / 1024,
        "processes": float(len(memory)),
    }


@contextmanager
def _agent(
    node: SimulatedNode, directory: str, config: str, kubelet: KubeletPlugins, bytecode: str
) -> Iterator[int]:
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    argv = [
        sys.executable, "-m", "integration.cli", "node", "--config", node.config_path,
        "--config-file", config, "--cdi-spec", f"{directory}/cdi/nvidia.yaml",
        "--kubelet-socket", kubelet.socket, "--pod-resources", str(kubelet.pod_resources),
        "--containerd-state", f"{directory}/containerd", "--mps-root", f"{directory}/mps",
        "--metrics", "127.0.0.1:0",
    ]  # fmt: skip
    # Not in the configuration's directory, which the agent watches: each line would wake it.
    os.makedirs(f"{directory}/log", exist_ok=True)  # from the previous start
    with (
        open(f"{directory}/log/agent.log", "wb") as log,
        subprocess.Popen(
            argv, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        ) as process,
    ):
        try:
            yield process.pid
        finally:
            end(process, timeout=30)


def _times(call: Callable[[], object]) -> list[float]:
    """Return the milliseconds of each call of a round, except the first few."""
    found = []
    for number in range(_CALLS + _FIRST):
        began = time.perf_counter()
        call()
        if number >= _FIRST:
            found.append((time.perf_counter() - began) * 1000)
    return sorted(found)


def _of(rounds: list[list[float]], part: float) -> float:
    """Return the value below which that part of a round lies; the median of the rounds."""
    return statistics.median(round_[int(part * len(round_))] for round_ in rounds)


def _tell(node: SimulatedNode) -> None:
    with open(f"{node.state}/nvml-events", "a", encoding="ascii") as file:
        file.write(_EVENT)


def _change(node: SimulatedNode, scenario: Scenario, pid: int) -> None:
    # Stop the agent meanwhile: a real node does not vanish while the agent creates nodes.
    os.kill(pid, signal.SIGSTOP)
    try:
        changed_node(node, scenario)
    finally:
        os.kill(pid, signal.SIGCONT)


def _delay(is_known: Callable[[], bool]) -> float:
    """Return the seconds until the kubelet knows."""
    began = time.monotonic()
    while not is_known():
        if time.monotonic() - began > _PATIENCE:
            raise RuntimeError(f"the kubelet got no list within {_PATIENCE:g} s")
        time.sleep(0.005)
    return time.monotonic() - began


# -- processes --------------------------------------------------------------------------------


def _idle(pid: int, seconds: float) -> tuple[float, float]:
    """Watch the processes for a while.

    Returns:
        The percentage of a processor that they use, including exited children; and how often a
        second one of their threads wakes up.
    """
    used, slept = _used(pid), _sleeps(pid)
    time.sleep(seconds)
    woken = sum(count - slept.get(thread, 0) for thread, count in _sleeps(pid).items())
    return (_used(pid) - used) / seconds * 100, woken / seconds


def _sleeps(pid: int) -> dict[str, int]:
    """Return the voluntary context switches of each of their threads."""
    found = {}
    for path in (path for each in family(pid) for path in glob(f"/proc/{each}/task/*/status")):
        with suppress(OSError), open(path, encoding="utf-8") as file:
            lines = dict(line.split(":\t", 1) for line in file if ":\t" in line)
            found[path] = int(lines["voluntary_ctxt_switches"])
    return found


def _used(pid: int) -> float:
    """Return the seconds of processor time, including exited children."""
    ticks = 0
    for each in family(pid):
        with suppress(OSError), open(f"/proc/{each}/stat", encoding="utf-8") as file:
            fields = file.read().rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")
