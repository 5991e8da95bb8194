"""How the cost of a container grows with its GPUs, mounts, cache and pod, at several sizes.

Each round measures all sizes in turn, also with containerd's own shim where it has the feature. The
shape of the curve counts: no cost may grow faster than its cause.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from hooks.image import ldcache
from hooks.plan import CachedLibrary
from hooks.words import Arch
from integration.containers.memory import pss_and_uss
from integration.simulated import Scenario, SimulatedNode
from tests.bench.interleaving import interleave
from tests.bench.results import Curve, Results, Row
from tests.bench.runs import once
from tests.bench.stage import GPUS, progress
from tests.harness.runtime import OURS, STOCK, Runtime, new_name
from tools.images import GLIBC, File, glibc, write_archive

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.bench.interleaving import Series
    from tests.bench.stage import Stage

_NODES: Final = {1: "one", 8: "eight", 16: "sixteen"}
_MOUNTS: Final = (0, 32, 64, 128)
_CACHE_ENTRIES: Final = (100, 1000, 4000, 16000)
# The first one also starts the shim, which another benchmark measures.
_CONTAINERS: Final = (2, 4, 8, 16, 32)
_POD: Final = "io.kubernetes.cri.sandbox-id"

_STOCK: Final = "runc-v2"
_OURS: Final = "nvidia-v1"
_OURS_GPUS: Final = "nvidia-v1, GPUs"
_OURS_FIRST: Final = "the first of its image"
_RUN: Final = "a start"


def measure_scaling(stage: Stage) -> Results:
    """Measure by GPUs, mounts, entries of the image's ld.so.cache, containers in a pod."""
    results = Results()
    for measure in (_by_gpus, _by_mounts, _by_cache, _by_containers):
        results = results.joined(measure(stage))
    return results


def _by_gpus(stage: Stage) -> Results:
    """Measure all GPUs of nodes of different sizes, with all capabilities."""
    with ExitStack() as cleanup:
        cases = {}
        for count, name in _NODES.items():
            node = SimulatedNode.create(f"{stage.directory}/node-{name}", Scenario.load(name))
            cleanup.enter_context(node)
            containerd = stage.containerd(cleanup, shim_config=node.config_path)
            run = once(Runtime(containerd, OURS), GLIBC, GPUS)
            cases[f"gpus {count}"] = run
            cases[f"first {count}"] = _as_first_of_its_image(node, run)
        found = _measured(stage, "GPUs", cases)
    return _curve("gpus", "GPUs", tuple(_NODES), found)


def _by_mounts(stage: Stage) -> Results:
    """Measure host directories that a container's spec mounts."""
    source = os.path.join(stage.directory, "mounted")
    os.makedirs(source, exist_ok=True)

    def flags(count: int) -> tuple[str, ...]:
        mounts = (f"type=bind,src={source},dst=/mnt/{n},options=rbind:ro" for n in range(count))
        return tuple(word for mount in mounts for word in ("--mount", mount))

    cases = _cases(stage, _MOUNTS, lambda _: GLIBC, flags)
    found = _measured(stage, "mounts", cases)
    return _curve("mounts", "mounts in the spec", _MOUNTS, found)


def _by_cache(stage: Stage) -> Results:
    """Measure libraries in the cache of an image's dynamic loader."""
    image = glibc()
    before = image.tree["etc/ld.so.cache"]
    if not isinstance(before, File):
        raise TypeError("the image has no ld.so.cache")
    images = {count: f"nvshim.local/cache-{count}:latest" for count in _CACHE_ENTRIES}
    for count, name in images.items():
        tree = {**image.tree, "etc/ld.so.cache": File(_cache(before.content, count))}
        archive = write_archive(
            f"{stage.directory}/cache.tar", [type(image)(name, tree, image.environment)]
        )
        stage.warm.ctr("images", "import", archive)
        os.unlink(archive)
    cases = _cases(stage, _CACHE_ENTRIES, images.__getitem__, lambda _: ())
    for count in _CACHE_ENTRIES:
        run = cases[f"gpus {count}"]
        cases[f"first {count}"] = _as_first_of_its_image(stage.node, run)
    found = _measured(stage, "entries of ld.so.cache", cases)
    return _curve("cache", "entries of the image's ld.so.cache", _CACHE_ENTRIES, found)


def _by_containers(stage: Stage) -> Results:
    """Measure containers of one pod: the time of the next one, and the memory of the shim."""
    rounds = max(1, stage.sizes.rounds // 8)
    tell = progress("containers in a pod", rounds)
    runtimes = {"stock": Runtime(stage.warm, STOCK), "ours": Runtime(stage.warm, OURS)}
    times: dict[str, list[tuple[float, ...]]] = {key: [] for key in runtimes}
    memory: dict[str, list[tuple[float, ...]]] = {key: [] for key in runtimes}
    for number in range(rounds):
        for key, runtime in runtimes.items():
            taken, weighed = _pod(runtime)
            times[key].append(taken)
            memory[key].append(weighed)
        tell(number + 1)
    places = tuple(map(float, _CONTAINERS))
    titles = {"stock": _STOCK, "ours": _OURS}

    def lines(found: dict[str, list[tuple[float, ...]]]) -> dict[str, Row]:
        return {
            key: Row(titles[key], tuple(map(statistics.median, zip(*all_, strict=True))))
            for key, all_ in found.items()
        }

    return Results(
        curves={
            "containers": Curve(
                "one more container", "containers in the pod", "ms", places, lines(times)
            ),
            "containers-memory": Curve(
                "PSS of a pod's shim", "containers in the pod", "MB", places, lines(memory)
            ),
        }
    )


def _pod(runtime: Runtime) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return milliseconds of a start, and MB of the shim, up to each number of containers."""
    flags = ("--null-io", "--annotation", f"{_POD}={new_name('pod')}")
    times: list[float] = []
    weighed = []
    taken: list[float] = []
    try:
        for number in range(1, _CONTAINERS[-1] + 1):
            begin = time.perf_counter()
            runtime.start_idle(flags=flags)
            times.append((time.perf_counter() - begin) * 1000)
            if number == 1:
                times = []
            if number in _CONTAINERS:
                taken.append(statistics.median(times))
                times = []
                (shim,) = runtime.containerd.shim_pids()
                weighed.append(pss_and_uss(shim)[0] / 1024)
        return tuple(taken), tuple(weighed)
    finally:
        runtime.close()


def _cases(
    stage: Stage,
    places: Sequence[int],
    image: Callable[[int], str],
    flags: Callable[[int], tuple[str, ...]],
) -> dict[str, Callable[[], float]]:
    """Return, for each place, containerd's own shim, this one, and this one with GPUs."""
    stock, ours = Runtime(stage.warm, STOCK), Runtime(stage.warm, OURS)
    cases = {}
    for place in places:
        cases[f"stock {place}"] = once(stock, image(place), flags(place))
        cases[f"ours {place}"] = once(ours, image(place), flags(place))
        cases[f"gpus {place}"] = once(ours, image(place), (*flags(place), *GPUS))
    return cases


def _as_first_of_its_image(node: SimulatedNode, run: Callable[[], float]) -> Callable[[], float]:
    """Return the same without the layer that an image's containers share; it recreates that."""

    def first() -> float:
        shutil.rmtree(os.path.join(node.directory, "layers"), ignore_errors=True)
        return run()

    return first


def _measured(stage: Stage, what: str, cases: dict[str, Callable[[], float]]) -> dict[str, Series]:
    rounds = max(3, stage.sizes.rounds // 2)
    return interleave(cases, rounds=rounds, warm_up=1, tell=progress(f"by {what}", rounds))


def _curve(key: str, axis: str, places: Sequence[int], found: dict[str, Series]) -> Results:
    titles = {"stock": _STOCK, "ours": _OURS, "gpus": _OURS_GPUS, "first": _OURS_FIRST}
    lines = {
        kind: Row(title, _values(found, kind, places))
        for kind, title in titles.items()
        if f"{kind} {places[0]}" in found
    }
    return Results(curves={key: Curve(_RUN, axis, "ms", tuple(map(float, places)), lines)})


def _values(found: dict[str, Series], kind: str, places: Sequence[int]) -> tuple[float, ...]:
    """Return the smallest value at each place: other load can only add to it."""
    return tuple(found[f"{kind} {place}"].least for place in places)


def _cache(content: bytes, count: int) -> bytes:
    """Return a cache with ``count`` entries: the image's, and libraries that it does not have."""
    cache = ldcache.parse(content)
    more = range(max(0, count - len(cache.entries)))
    libraries = (
        CachedLibrary(f"libmore{n}.so.1", f"/usr/lib/libmore{n}.so.1", Arch.X86_64) for n in more
    )
    return ldcache.serialise(cache.merge(libraries))
