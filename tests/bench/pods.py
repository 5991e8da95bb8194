"""The cost of many pods on one node: memory, and the time to create and remove them.

Pods are created as a kubelet does, through the CRI: a pause container and two more in each pod,
several pods at a time. Each shim has its own containerd. They take turns with a batch of pods each,
so that other load slows down both. The difference between the last batches and the first is the
cost of a full node. Then all are removed and created again, twice: the times of batches differ more
than those of the two shims.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from api.proto import cri_pb2 as pb
from integration.containers import traces
from integration.containers.memory import pss_and_uss
from tests.bench.results import Comparison, Curve, Figure, Figures, Results, Row
from tests.bench.stage import HANDLER, say
from tests.harness.pods import IDLE, Pods
from tests.harness.runtime import OURS, STOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.bench.stage import Stage
    from tests.harness.pods import Pod
    from tools.containerd import PrivateContainerd

# The number that a kubelet starts at the same time on a small node.
_AT_ONCE: Final = 4
_CONTAINERS: Final = 2
_BATCHES: Final = 10
_TURNS: Final = 3
_SETTLE: Final = 1.0

_COLUMNS: Final = {"stock": "runc-v2", "ours": "nvidia-v1"}


@dataclass(slots=True)
class _Side:
    """The pods of one shim, and their cost so far."""

    pods: Pods  # the CRI of its containerd
    running: list[Pod] = field(default_factory=list)  # the running pods
    # milliseconds for each pod, batch by batch
    created: list[float] = field(default_factory=list)
    removed: list[float] = field(default_factory=list)  # the same
    # KiB of all shims and fork servers, after each batch; of the first turn, as ``taken``
    pss: list[float] = field(default_factory=list)
    # KiB by which each batch reduced the machine's available memory
    taken: list[float] = field(default_factory=list)


def measure_pods(stage: Stage) -> Results:
    """Measure the configured number of pods with each shim."""
    size = max(_AT_ONCE, stage.sizes.pods // _BATCHES)
    count = stage.sizes.pods // size
    say(f"{count * size} pods of {_CONTAINERS} containers, in {count} batches")
    with ExitStack() as cleanup:
        sides = {
            key: _Side(cleanup.enter_context(_pods(stage, runtime)))
            for key, runtime in (("stock", STOCK), ("ours", OURS))
        }
        workers = cleanup.enter_context(ThreadPoolExecutor(_AT_ONCE))
        for side in sides.values():
            # The first pod of a node creates what the others reuse.
            _run(side.pods).remove()
        for turn in range(_TURNS):
            for number in range(count):
                for side in _in_turn(sides, number):
                    _create(side, size, workers, weigh=turn == 0)
            for number in range(count):
                for side in _in_turn(sides, number):
                    _remove(side, size, workers)
    return _results(sides, count * size, size)


@contextmanager
def _pods(stage: Stage, runtime: str) -> Iterator[Pods]:
    with stage.containerd_with_pods(runtime) as containerd:
        pods = Pods(containerd, HANDLER)
        try:
            yield pods
        finally:
            # After a failure, removing containerd is faster than removing each pod.
            pods.cri.close()


def _in_turn(sides: dict[str, _Side], number: int) -> list[_Side]:
    both = list(sides.values())
    return both if number % 2 else both[::-1]


def _create(side: _Side, size: int, workers: ThreadPoolExecutor, *, weigh: bool) -> None:
    before = _available()
    begin = time.perf_counter()
    side.running += workers.map(_run, [side.pods] * size)
    side.created.append((time.perf_counter() - begin) * 1000 / size)
    time.sleep(_SETTLE)
    if weigh:
        side.taken.append(before - _available())
        side.pss.append(sum(_memory(side.pods.containerd)))


def _remove(side: _Side, size: int, workers: ThreadPoolExecutor) -> None:
    going, side.running = side.running[:size], side.running[size:]
    begin = time.perf_counter()
    list(workers.map(_end, going))
    side.removed.append((time.perf_counter() - begin) * 1000 / size)
    for pod in going:
        pod.forget()


def _run(pods: Pods) -> Pod:
    """Run a pod on the node's network: a bridge has too few ports for so many."""
    pod = pods.run(namespaces=pb.NamespaceOption(network=pb.NODE, pid=pb.CONTAINER))
    for _ in range(_CONTAINERS):
        pod.start(*IDLE)
    return pod


def _end(pod: Pod) -> None:
    cri = pod.pods.cri
    cri.stop_pod_sandbox(pb.StopPodSandboxRequest(pod_sandbox_id=pod.id))
    cri.remove_pod_sandbox(pb.RemovePodSandboxRequest(pod_sandbox_id=pod.id))


def _memory(containerd: PrivateContainerd) -> Iterator[int]:
    """Yield the KiB of PSS of each shim and fork server."""
    for pid in {*containerd.shim_pids(), *traces.fork_servers(containerd.marks)}:
        yield pss_and_uss(pid)[0]


def _available() -> int:
    """Return the KiB that are available on the machine."""
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))


def _results(sides: dict[str, _Side], count: int, size: int) -> Results:
    title = f"{count} pods of {_CONTAINERS} containers"

    def values(of: Callable[[_Side], float]) -> dict[str, float]:
        return {key: of(side) for key, side in sides.items()}

    def rows(of: Callable[[_Side], list[float]]) -> dict[str, Row]:
        return {key: Row(_COLUMNS[key], tuple(of(side))) for key, side in sides.items()}

    def compared(what: str, of: Callable[[_Side], list[float]]) -> Comparison:
        found = rows(of)
        found["ours"] = replace(found["ours"], base="stock")
        return Comparison(f"{title}: {what}", "ms", found)

    figures = {
        "pss": Figure(
            "PSS of all shims and fork servers", "MB", values(lambda side: side.pss[-1] / 1024)
        ),
        # Other programs use memory, too, so multiply the median of the batches by their number.
        "taken": Figure(
            "memory that the machine has less", "MB",
            values(lambda side: statistics.median(side.taken) * len(side.taken) / 1024),
        ),
        "rate": Figure(
            "pods created in a second", "",
            values(lambda side: 1000 * len(side.created) / sum(side.created)),
        ),
        "end": Figure(
            "seconds to remove them all", "s",
            values(lambda side: sum(side.removed) * size / 1000 / _TURNS),
        ),
    }  # fmt: skip
    places = tuple(float(size * number) for number in range(1, len(sides["ours"].pss) + 1))
    created = rows(lambda side: side.created[: len(places)])
    memory = rows(lambda side: [each / 1024 for each in side.pss])
    return Results(
        comparisons={
            "pods-create": compared("to create one", lambda side: side.created),
            "pods-remove": compared("to remove one", lambda side: side.removed),
        },
        figures={"pods": Figures(title, _COLUMNS, "stock", figures)},
        curves={
            "pods-create": Curve("to create one more pod", "pods", "ms", places, created),
            "pods-memory": Curve("PSS of all shims", "pods", "MB", places, memory),
        },
    )
