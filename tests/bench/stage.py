"""What measurements need, made when the first of them asks: a node, images, containerds.

Everything is removed at the end, also after a failure or a signal that ends the benchmark.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self

from integration.simulated import Scenario, SimulatedNode
from shim.handlers import restore_handlers
from tests.bench.processor import Meter
from tests.harness.dist import built
from tests.harness.low_level import without_second_cgroups
from tests.harness.pods import containerd_for_pods
from tools.containerd import PrivateContainerd
from tools.cri.plugin import CriContainerd, CriPlugin
from tools.images import PAUSE, busybox, glibc, pause, write_archive
from tools.parts import Parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

GPUS: Final = ("--env", "NVIDIA_VISIBLE_DEVICES=all", "--env", "NVIDIA_DRIVER_CAPABILITIES=all")
"""The flags of ``ctr run`` that ask for every GPU with every capability."""

HANDLER: Final = "measured"
"""The runtime handler of pods."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything is measured."""

    rounds: int  # of each comparison
    shims: int  # idle at the same time
    many: tuple[int, ...]  # containers that run at once, each time
    execs: int  # in one shim, to see what they leave
    pods: int  # on the node at once
    watch: float  # seconds that idle shims are watched for wake-ups
    idle: float = 60  # seconds that the idle node agent is watched


class Stage:
    """Where it all happens. As a context: what was made is removed at its end."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._cleanup = ExitStack()
        self._signals: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Python ends at these without a word, and a hundred shims would stay behind.
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._signals[number] = signal.signal(number, _interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        # Whoever has no patience with the cleaning up would have to do it by hand.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.signal(number, signal.SIG_IGN)
            self._signals.setdefault(number, before)
        try:
            self._cleanup.close()
        finally:
            restore_handlers(self._signals)

    @cached_property
    def directory(self) -> str:
        """For whatever a measurement wants to write."""
        return self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="nvshim-bench-"))

    @cached_property
    def node(self) -> SimulatedNode:
        """A node with two simulated GPUs."""
        return self._cleanup.enter_context(
            SimulatedNode.create(f"{self.directory}/node", Scenario.load("two"), say=say)
        )

    @cached_property
    def launcher(self) -> str:
        """The path of this shim, in a tree as a node gets it."""
        return f"{built().path}/bin/containerd-shim-nvidia-v1"

    @cached_property
    def warm(self) -> PrivateContainerd:
        """A containerd whose shims are forked from a fork server."""
        return self.containerd()

    @cached_property
    def cold(self) -> PrivateContainerd:
        """One whose fork server is ended over and over by a measurement."""
        return self.containerd()

    @cached_property
    def metered(self) -> Meter:
        """One whose processor time is metered, with that of all that it starts."""
        return Meter(self.containerd()).begin()

    @cached_property
    def for_crun(self) -> PrivateContainerd:
        """One whose mounts crun understands."""
        parts = Parts.installed()
        program = without_second_cgroups(self.directory, parts.containerd)
        return self.containerd(parts=replace(parts, containerd=program))

    @contextmanager
    def containerd_with_pods(self, runtime: str) -> Iterator[CriContainerd]:
        """One that serves the CRI, and is removed at the end of the context.

        Args:
            runtime: the runtime of its only handler, which has the name :data:`HANDLER`.
        """
        plugin = CriPlugin(
            {HANDLER: {"runtime_type": runtime}}, sandbox_image=PAUSE, default_handler=HANDLER
        )
        with containerd_for_pods(
            busybox(), glibc(), pause(), cri=plugin, **self._options
        ) as containerd:
            yield containerd

    @property
    def _options(self) -> dict[str, Any]:
        """What all private containerds have here."""
        return {
            "shim_directory": os.path.dirname(self.launcher),
            "shim_config": self.node.config_path,
            "debug": False,
            "environment": {},  # what is measured has its own, and not that of tests
        }

    @cached_property
    def _archive(self) -> str:
        return write_archive(f"{self.directory}/images.tar", [busybox(), glibc(), pause()])

    def containerd(self, cleanup: ExitStack | None = None, **options: Any) -> PrivateContainerd:
        """Another one, with the images.

        Args:
            cleanup: where its removal is noted; the stage's own end if None.
            options: of :class:`PrivateContainerd`, besides what all have here.
        """
        containerd = (cleanup or self._cleanup).enter_context(
            PrivateContainerd(**{**self._options, **options})
        )
        containerd.ctr("images", "import", self._archive)
        return containerd


def say(line: str) -> None:
    """Tell a person what goes on; the results alone go to stdout."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def progress(what: str, rounds: int) -> Callable[[int], None]:
    """Tell a person that something begins, and, at a terminal, how far it is."""
    say(f"{what}, {rounds} rounds")
    if not sys.stderr.isatty():
        return lambda _: None

    def tell(done: int) -> None:
        if done > 0:
            end = "\n" if done == rounds else ""
            sys.stderr.write(f"\r{what}: round {done} of {rounds}{end}")

    return tell


def _interrupt(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)
