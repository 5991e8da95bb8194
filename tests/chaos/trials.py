"""Fail one GPU of eight, or NVML, while a pod starts: do the other GPUs stay usable?

A trial is a fault at one moment. An agent serves a kubelet on a simulated node with eight GPUs, a
pod gets one of them, and the fault happens while the pod starts. Then pods are admitted and started
until seven healthy GPUs have run a container of the shim, on a real containerd. The trial fails if
one of them cannot, if a call takes longer than a kubelet waits, or if the agent dies.

Times are reported, not judged: they depend on the machine.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self, TypeVar

import grpc  # type: ignore[import-untyped] # it ships no types

from integration.simulated import Scenario, SimulatedNode
from integration.timeouts import PATIENCE
from tests.harness.kubelet_plugins import KubeletPlugins
from tests.harness.node_agent import NodeAgent
from tests.harness.waiting import eventually
from tools.images import GLIBC

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.harness.runtime import Container, Runtime

__all__ = ["FAULTS", "MOMENTS", "Failed", "Fault", "Machine", "Outcome"]

T = TypeVar("T")

GPU: Final = "nvidia.com/gpu"
_COUNT: Final = 8
_HEARD: Final = 90.0 * PATIENCE  # seconds within which the kubelet has to hear of a dead GPU
_TRIES: Final = 3 * _COUNT


class Failed(Exception):
    """A dead GPU has affected others; ``str()`` says how."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to inject."""

    lines: str  # lines of the simulated NVML's fault file
    # index of the dead GPU; None if none is dead, or if the agent cannot tell which
    dead: int | None = 3
    # whether the agent gets an event; otherwise it notices at its next query of NVML, every five
    # minutes
    heard: bool = True


FAULTS: Final = {
    "a GPU is lost": Fault("gpu3=error:15"),
    "a GPU needs a reset": Fault("gpu3=error:16"),
    "a GPU answers nonsense": Fault("gpu3=error:999"),
    "a GPU hangs": Fault("gpu3=hang"),
    "a GPU crashes NVML": Fault("gpu3=crash"),
    "a GPU is not counted": Fault("count=7", 7, heard=False),
    "a GPU lies of its UUID": Fault("gpu3.nvmlDeviceGetUUID=error:999", None),
    "NVML hangs": Fault("any=hang", None),
    "NVML crashes": Fault("any=crash", None),
    "NVML lies of its version": Fault("driver=550.54.15", None),
}
"""The faults by name."""

MOMENTS: Final = ("idle", "preferred", "allocate", "start", "exec")
"""Before any call; before GetPreferredAllocation, Allocate, the container's start, and an exec."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a trial."""

    # seconds until the kubelet heard of the dead GPU; None if none died, or none is reported
    told: float | None
    preferred: float  # the longest GetPreferredAllocation, in seconds
    allocate: float  # the longest Allocate
    start: float  # the longest start of a container to its end
    wasted: int  # pods that were given the dead GPU before anybody knew


class Machine:
    """A node with eight GPUs, an agent and a kubelet. Everything runs while the context is open.

    Args:
        runtime: a containerd whose shims get this node's configuration from ``configure``.
        directory: an empty directory.
        configure: writes the shim's configuration for a node.
    """

    def __init__(
        self, runtime: Runtime, directory: str, configure: Callable[[SimulatedNode], None]
    ) -> None:
        self._runtime, self._directory, self._configure = runtime, directory, configure
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            made = SimulatedNode.create(f"{self._directory}/node", Scenario.of(_COUNT))
            self.node = stack.enter_context(made)
            with open(self.node.config_path, "a", encoding="utf-8") as file:
                file.write(f'nvml-timeout = 2\n[cdi]\nspec-dirs = ["{self._directory}/cdi"]\n')
            self._configure(self.node)
            self.kubelet = stack.enter_context(KubeletPlugins(f"{self._directory}/kubelet"))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, fault: Fault, moment: str) -> Outcome:
        """Run one trial: inject a fault at a moment.

        Raises:
            Failed: a healthy GPU could not be allocated, or the agent exited.
        """
        self._forget()
        with NodeAgent(self.node, self._directory, self.kubelet.socket) as agent:
            self.kubelet.wait_for(GPU, _COUNT, timeout=60)
            trial = _Trial(self._runtime, self.node, self.kubelet, fault)
            try:
                outcome = trial.run(moment)
            finally:
                self._runtime.close()
            if agent.process is None or agent.process.poll() is not None:
                raise Failed("the agent has ended")
            if restarted := agent.said("of the agent ended"):
                raise Failed(f"a part of the agent has ended: {restarted[0]['event']}")
        return outcome

    def _forget(self) -> None:
        """Remove what an earlier trial left."""
        self.kubelet.assignments.clear()
        self._write("")
        for name in ("inventory.json", "health.json", "node.json"):
            with suppress(FileNotFoundError):
                os.unlink(f"{self.node.state}/{name}")

    def _write(self, lines: str) -> None:
        with open(f"{self.node.state}/nvml-faults", "w", encoding="ascii") as file:
            file.write(lines)


class _Trial:
    """One trial."""

    def __init__(
        self, runtime: Runtime, node: SimulatedNode, kubelet: KubeletPlugins, fault: Fault
    ) -> None:
        self._runtime, self._node, self._kubelet, self._fault = runtime, node, kubelet, fault
        self._uuids = [gpu.uuid for gpu in node.scenario.gpus]
        self._dead = None if fault.dead is None else self._uuids[fault.dead]
        self._took = {"preferred": 0.0, "allocate": 0.0, "start": 0.0}
        self._ran: set[str] = set()
        self._given: set[str] = set()
        self._wasted = 0
        self._happened = 0.0
        self._heard_after: float | None = None
        self._listener = threading.Thread(target=self._listen, daemon=True)

    def run(self, moment: str) -> Outcome:
        # The first pod is on its way when it happens; it gets the GPU that dies, if it can.
        self._way(self._dead or self._uuids[0], happens_at=moment)
        alive = set(self._uuids) - {self._dead}
        for _ in range(_TRIES):
            if len(self._ran & alive) >= _COUNT - 1:
                break
            self._admit()
        else:
            missing = len(alive - self._ran)
            raise Failed(f"{missing} of the healthy GPUs cannot be allocated")
        told = self._told() if self._dead is not None and self._fault.heard else None
        took = self._took
        return Outcome(
            told, took["preferred"], took["allocate"], took["start"], wasted=self._wasted
        )

    def _way(self, uuid: str, *, happens_at: str) -> None:
        """Run the pod during whose start the fault happens."""
        plugin = self._kubelet.plugins[GPU]
        self._happen("idle", happens_at)
        self._happen("preferred", happens_at)
        self._timed("preferred", lambda: plugin.preferred(self._uuids, 1))
        self._happen("allocate", happens_at)
        try:
            self._timed("allocate", lambda: plugin.allocate(uuid))
        except grpc.RpcError as error:
            if uuid != self._dead:
                raise Failed(f"Allocate: {error.details()}") from error
            return
        self._given.add(uuid)
        self._happen("start", happens_at)
        container = self._timed("start", lambda: self._start(uuid))
        self._happen("exec", happens_at)
        if container is not None:
            done = container.exec("sh", "-c", "echo alive")
            if done.stdout != "alive\n":
                raise Failed(f"an exec: {done.stderr}")
            self._ran.add(uuid)
        elif uuid != self._dead:
            raise Failed("the first container does not start")

    def _happen(self, here: str, at: str) -> None:
        if here == at and not self._happened:
            with open(f"{self._node.state}/nvml-faults", "w", encoding="ascii") as file:
                file.write(self._fault.lines)
            self._happened = time.monotonic()
            if self._dead is not None and self._fault.heard:
                self._listener.start()

    def _listen(self) -> None:
        """Record when the kubelet hears of the dead GPU."""
        with suppress(AssertionError):
            eventually(
                lambda: self._dead not in self._kubelet.healthy(GPU),
                "the kubelet hears of the dead GPU", timeout=_HEARD,
            )  # fmt: skip
            self._heard_after = time.monotonic() - self._happened

    def _admit(self) -> None:
        """Admit a pod with the devices that the kubelet believes healthy, and start it."""
        plugin = self._kubelet.plugins[GPU]
        free = sorted(self._kubelet.healthy(GPU) - self._given)
        if not free:
            raise Failed(f"the kubelet has none left, after {len(self._ran)} of {_COUNT - 1}")
        (uuid,) = self._timed("preferred", lambda: plugin.preferred(free, 1))
        self._given.add(uuid)
        try:
            self._timed("allocate", lambda: plugin.allocate(uuid))
        except grpc.RpcError as error:
            if uuid != self._dead:
                raise Failed(f"Allocate of a GPU that is not dead: {error.details()}") from error
            self._wasted += 1
            return
        container = self._timed("start", lambda: self._start(uuid))
        if container is not None:
            self._ran.add(uuid)
        self._wasted += uuid == self._dead

    def _start(self, uuid: str) -> Container | None:
        """Start a container with a GPU; None if it does not start, as only a dead GPU's may."""
        container = self._runtime.expect()
        flags = ("--detach", "--env", f"NVIDIA_VISIBLE_DEVICES={uuid}")
        words = self._runtime.words("sleep", "1000", image=GLIBC, name=container.name, flags=flags)
        done = self._runtime.containerd.ctr(*words, check=False)
        if done.code and uuid != self._dead:
            raise Failed(f"a container with a GPU that is not dead: {done.stderr.strip()}")
        if done.code:
            container.remove()
            return None
        return container

    def _told(self) -> float:
        """Return the seconds until the kubelet heard of the dead GPU, and of no other one."""
        self._listener.join()
        if self._heard_after is None:
            raise Failed("the kubelet does not hear of the dead GPU")
        left = self._kubelet.healthy(GPU)
        if left != set(self._uuids) - {self._dead}:
            raise Failed(f"the kubelet has {len(left)} healthy ones")
        return self._heard_after

    def _timed(self, what: str, do: Callable[[], T]) -> T:
        begun = time.monotonic()
        try:
            return do()
        finally:
            self._took[what] = max(self._took[what], time.monotonic() - begun)
