"""``python -m tests.bench.injection``: the cost of injecting GPUs into a container, by step.

In each round the engine does, in this process, everything that a forked shim does between reading
and writing the spec. It uses a fresh overlay of a real image and the driver's real files, on
simulated nodes of different sizes, and requests all devices and capabilities. The steps are those
of the record. An inventory is "cold" when it is created again, without NVML's answer.

In addition to the engine alone, the shim's work is measured, from a bundle to a mounted rootfs and
a written spec: for the first container of an image, and for later ones that share its layer. The
process is in the state of a fork of the fork server: the configuration and the cached inventory are
already decoded.

Nothing is deleted between rounds. For a minute after a deletion, ext4 without a journal checks each
inode that was deleted nearby before it creates a file: 0.8 ms instead of 0.05, after 6,000
deletions.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

from hooks import engine
from hooks.config import load_config
from hooks.node.inventory import take_inventory
from hooks.requests.prefilter import prefilter
from hooks.requests.request import read_request
from integration.simulated import Scenario, SimulatedNode
from shim import bundle, files
from shim.forkserver.serving import look_at_node
from shim.log import Log
from shim.work.provision import Provision
from shim.work.worker import Link
from tests.bench.interleaving import Series, interleave
from tests.bench.report import report
from tests.bench.results import Curve, Figure, Figures, Results, Row
from tests.bench.stage import progress
from tools.images import glibc, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hooks.config import Config
    from hooks.node.inventory import Inventory
    from tests.bench.stage import Stage

NODES: Final = {"one": "1 GPU", "eight": "8 GPUs", "sixteen": "16 GPUs", "mig": "1 GPU, 10 MIG"}
"""The scenarios that are measured, with their titles."""

DECIDED: Final = "plan to files"
"""The engine's work once it knows request and node: plan, apply, verify, files."""

_SHIMS: Final = {
    "first": "the shim's work: the first container of an image",
    "later": "the shim's work: later containers of the image",
}

_GROWING: Final = {1: "one", 8: "eight", 16: "sixteen"}

_BUNDLES: Final = "/dev/shm"
"""The directory of bundles: on a tmpfs, like containerd's state directory on a node."""

_ASKED: Final = ("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=all")


class Injection:
    """Injections into fresh overlays of one image, on one node.

    Attributes:
        steps: milliseconds of each step of each round, by its name; "all" is everything.
        answer: of NVML on this node, as its command prints it.
    """

    def __init__(self, node: SimulatedNode, image: str, directory: str) -> None:
        self.steps: dict[str, list[float]] = {}
        self._config_path = node.config_path
        self._config: Config = load_config(node.config_path)
        self._image = image
        self._directory = directory
        self._spec = _spec(directory)
        self._layers = self._config.layers
        self.answer = subprocess.run(
            engine.probe_command(self._config), check=True, capture_output=True, env={}
        ).stdout

    def warm(self) -> float:
        """Run one container on a node with a cached inventory; return milliseconds."""
        with self._overlay() as rootfs, _quiet():
            began = time.perf_counter()
            inventory = engine.load_inventory(self._config)
            laps = {"inventory": _since(began)}
            if inventory is None:
                raise RuntimeError("a fresh inventory was not kept: NVML would be asked")
            laps |= self._inject(inventory, rootfs)
            laps["all"] = _since(began)
        for step, milliseconds in laps.items():
            self.steps.setdefault(step, []).append(milliseconds)
        return laps["all"]

    def first(self) -> float:
        """Do the shim's work for the first container of an image; return milliseconds."""
        if os.path.isdir(self._layers):
            os.rename(self._layers, f"{tempfile.mkdtemp(dir=self._directory)}/layers")
        return self.later()

    def later(self) -> float:
        """Do the shim's work for a later container of the same image; return milliseconds."""
        base = tempfile.mkdtemp(dir=self._directory)
        os.environ["NVSHIM_CONFIG"] = self._config_path
        look_at_node()
        with (
            tempfile.TemporaryDirectory(prefix="nvshim-bench-", dir=_BUNDLES) as directory,
            _quiet(),
        ):
            for path in (f"{base}/upper", f"{base}/work", f"{directory}/rootfs"):
                os.mkdir(path)
            shutil.copy(os.path.join(self._directory, bundle.CONFIG), directory)
            layers = f"lowerdir={self._image}"
            options = ["index=off", f"upperdir={base}/upper", f"workdir={base}/work", layers]
            provision = Provision(directory, Log(base, debug=False), _Alone())
            began = time.perf_counter()
            wanted = [("overlay", "overlay", "", options)]
            _, layer = provision.provide(prefilter(self._spec), wanted, "runc")
            milliseconds = _since(began)
            subprocess.run(["umount", f"{directory}/rootfs"], check=True)
            if layer < 0:
                raise RuntimeError("the image has no layer")
            os.close(layer)
            return milliseconds

    def cold(self) -> float:
        """Create the inventory again, without NVML's answer; return milliseconds."""
        with _quiet():
            began = time.perf_counter()
            take_inventory(self._config, None)
            return _since(began)

    def take(self) -> None:
        """Create the inventory with NVML's answer, as the first container of a node does."""
        take_inventory(self._config, self.answer)

    def _inject(self, inventory: Inventory, rootfs: str) -> dict[str, float]:
        began = time.perf_counter()
        request = read_request(self._spec)
        laps = {"request": _since(began)}
        injection = engine.inject(
            self._spec,
            request,
            inventory,
            engine.RootfsTarget(rootfs, os.path.join(self._directory, bundle.STAGING)),
            config=self._config,
        )
        laps |= injection.record["milliseconds"]
        laps[DECIDED] = sum(injection.record["milliseconds"].values())
        # Do not overwrite the spec that the next round starts with.
        written = os.path.join(self._directory, "written")
        os.makedirs(written, exist_ok=True)
        began = time.perf_counter()
        files.write(os.path.join(written, bundle.RECORD), json.dumps(injection.record).encode())
        bundle.write_spec(written, injection.spec)
        laps["write"] = _since(began)
        return laps

    @contextmanager
    def _overlay(self) -> Iterator[str]:
        """Yield a fresh overlay of the image, like those of containerd's snapshotter."""
        with tempfile.TemporaryDirectory(dir=self._directory) as base:
            for name in ("upper", "work", "rootfs"):
                os.mkdir(os.path.join(base, name))
            rootfs = os.path.join(base, "rootfs")
            options = f"lowerdir={self._image},upperdir={base}/upper,workdir={base}/work"
            subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, rootfs], check=True)
            try:
                yield rootfs
            finally:
                subprocess.run(["umount", rootfs], check=True)


def measure_injections(
    rounds: int, *, tell: Callable[[int], None] = lambda _: None
) -> dict[str, dict[str, Series]]:
    """Measure on nodes of all sizes, interleaved.

    Args:
        tell: called with the number of finished rounds.

    Returns:
        Milliseconds by the node's scenario and the step: those of a warm injection, "all" of it,
        the shim's work, and "cold" for creating the inventory again.
    """
    with ExitStack() as cleanup:
        directory = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="nvshim-bench-"))
        image = unpack(glibc().tree, f"{directory}/image")
        cases: dict[str, Injection] = {}
        for name in NODES:
            os.mkdir(f"{directory}/{name}")
            node = cleanup.enter_context(
                SimulatedNode.create(f"{directory}/node-{name}", Scenario.load(name))
            )
            cases[name] = Injection(node, image, f"{directory}/{name}")

        def on_all(method: str, **options: Any) -> dict[str, Series]:
            measured = {name: getattr(case, method) for name, case in cases.items()}
            return interleave(measured, rounds=rounds, **options)

        cold = on_all("cold")
        for case in cases.values():
            case.take()
        on_all("warm", tell=tell)
        shims = {step: on_all(step) for step in _SHIMS}
        return {
            name: {
                **{step: Series(tuple(v[-rounds:])) for step, v in case.steps.items()},
                **{step: series[name] for step, series in shims.items()},
                "cold": cold[name],
            }
            for name, case in cases.items()
        }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.injection", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="of each node; 50")
    asked = parser.parse_args()
    if os.geteuid() != 0:
        sys.stderr.write("bench: must be root\n")
        return 1
    sys.stdout.write(report(injection_results(measure_injections(asked.rounds))))
    return 0


def measure_injection(stage: Stage) -> Results:
    """Measure the engine alone, on nodes of all sizes: the steps of an injection."""
    rounds = 2 * stage.sizes.rounds
    return injection_results(measure_injections(rounds, tell=progress("injections", rounds)))


def injection_results(found: dict[str, dict[str, Series]]) -> Results:
    """Return the result of :func:`measure_injections` as a table and a curve."""
    others = {"all", DECIDED, "cold", *_SHIMS}
    titles = {
        "all": "injection, warm inventory: all of it",
        DECIDED: "of it plan, apply, verify, files",
        **{step: f"step: {step}" for step in found["eight"] if step not in others},
        **_SHIMS,
        "cold": "creating the inventory, without NVML",
    }
    rows = {
        "decided" if step == DECIDED else step: Figure(
            title, "ms", {name: found[name][step].median for name in NODES}
        )
        for step, title in titles.items()
    }
    line = Row("nvidia-v1", tuple(found[name]["all"].median for name in _GROWING.values()))
    places = tuple(map(float, _GROWING))
    return Results(
        figures={"injection": Figures("the engine alone, medians", NODES, None, rows)},
        curves={"injection": Curve("the engine alone", "GPUs", "ms", places, {"ours": line})},
    )


class _Alone(Link):
    """The connection of a process that does a worker's work itself."""

    def __init__(self) -> None:
        """Open no connection."""

    def extend_deadline(self, seconds: float) -> None:
        """Do nothing: there is no deadline."""


def _spec(directory: str) -> dict[str, Any]:
    """Return the spec that runc proposes, with a request for everything."""
    subprocess.run(["runc", "spec", "--bundle", directory], check=True)
    with open(os.path.join(directory, bundle.CONFIG), encoding="utf-8") as file:
        spec: dict[str, Any] = json.load(file)
    spec["process"]["env"] += _ASKED
    bundle.write_spec(directory, spec)
    return spec


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable garbage collection, which a forked shim has frozen too."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _since(began: float) -> float:
    return (time.perf_counter() - began) * 1000


if __name__ == "__main__":
    sys.exit(main())
