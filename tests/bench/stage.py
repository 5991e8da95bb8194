"""What measurements share, created on first use: a node, images, containerds.

Everything is removed at the end, also after a failure or a signal.
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
from shim import syscalls
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
"""The flags of ``ctr run`` that request every GPU with every capability."""

HANDLER: Final = "measured"
"""The runtime handler of pods."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything is measured."""

    rounds: int  # rounds of each comparison
    shims: int  # shims that idle at the same time
    many: tuple[int, ...]  # numbers of containers that run at once
    execs: int  # execs in one shim, to see what they leave
    pods: int  # pods on the node at once
    watch: float  # seconds that idle shims are watched for wake-ups
    idle: float = 60  # seconds that the idle node agent is watched


class Stage:
    """The environment of all measurements. As a context it removes everything at its end."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._cleanup = ExitStack()
        self._signals: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # By default these signals kill Python at once, and a hundred shims would be left.
        for number in (signal.SIGTERM, signal.SIGHUP):
            self._signals[number] = signal.signal(number, _interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        # Ignore signals during the cleanup, because otherwise the user must do it by hand.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.signal(number, signal.SIG_IGN)
            self._signals.setdefault(number, before)
        try:
            self._cleanup.close()
        finally:
            restore_handlers(self._signals)

    @cached_property
    def directory(self) -> str:
        """Return a directory for the files of a measurement."""
        return self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="nvshim-bench-"))

    @cached_property
    def node(self) -> SimulatedNode:
        """Return a node with two simulated GPUs."""
        return self._cleanup.enter_context(
            SimulatedNode.create(f"{self.directory}/node", Scenario.load("two"), say=say)
        )

    @cached_property
    def launcher(self) -> str:
        """Return the path of this shim, in a tree as installed on a node."""
        return f"{built().path}/bin/containerd-shim-nvidia-v1"

    @cached_property
    def warm(self) -> PrivateContainerd:
        """Return a containerd whose shims are forked from a fork server."""
        return self.containerd()

    @cached_property
    def cold(self) -> PrivateContainerd:
        """Return a containerd whose fork server a measurement stops over and over."""
        return self.containerd()

    @cached_property
    def metered(self) -> Meter:
        """Return the meter of a containerd and of everything that it starts."""
        return Meter(self.containerd()).begin()

    @cached_property
    def for_crun(self) -> PrivateContainerd:
        """Return a containerd whose mounts crun understands."""
        parts = Parts.installed()
        program = without_second_cgroups(self.directory, parts.containerd)
        return self.containerd(parts=replace(parts, containerd=program))

    @contextmanager
    def containerd_with_pods(self, runtime: str) -> Iterator[CriContainerd]:
        """Yield a containerd that serves the CRI; it is removed at the end of the context.

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

    @cached_property
    def _fifos(self) -> str:
        """Return a directory for ctr's fifos, which are in /run on a node."""
        return self._cleanup.enter_context(
            tempfile.TemporaryDirectory(prefix="nvshim-bench-", dir="/run")
        )

    @property
    def _options(self) -> dict[str, Any]:
        """Return the options of all private containerds here."""
        return {
            "shim_directory": os.path.dirname(self.launcher),
            "shim_config": self.node.config_path,
            "debug": False,
            "environment": {},  # without the variables that tests set
            "amend": _mount_state,
        }

    @cached_property
    def _archive(self) -> str:
        return write_archive(f"{self.directory}/images.tar", [busybox(), glibc(), pause()])

    def containerd(self, cleanup: ExitStack | None = None, **options: Any) -> PrivateContainerd:
        """Return another containerd, with the images.

        Args:
            cleanup: where its removal is registered; the stage's own end if None.
            options: further options of :class:`PrivateContainerd`.
        """
        containerd = PrivateContainerd(**{**self._options, **options})
        containerd.fifo_directory = self._fifos
        (cleanup or self._cleanup).enter_context(containerd)
        containerd.ctr("images", "import", self._archive)
        return containerd


def say(line: str) -> None:
    """Report progress on stderr; only the results go to stdout."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def progress(what: str, rounds: int) -> Callable[[int], None]:
    """Report that a measurement starts, and, at a terminal, its progress."""
    say(f"{what}, {rounds} rounds")
    if not sys.stderr.isatty():
        return lambda _: None

    def tell(done: int) -> None:
        if done > 0:
            end = "\n" if done == rounds else ""
            sys.stderr.write(f"\r{what}: round {done} of {rounds}{end}")

    return tell


def _mount_state(config: str) -> None:
    """Mount a tmpfs for the state of a containerd that is about to start.

    It is in /run on a node. On ext4, a file is created slower after many deletions, and each of a
    bundle's files would be measured.

    Args:
        config: the path of its configuration, next to which its state is.
    """
    state = os.path.join(os.path.dirname(config), "state")
    os.makedirs(state, exist_ok=True)
    if not os.path.ismount(state):  # it was started before
        syscalls.mount("tmpfs", state, "tmpfs", 0, "mode=711")


def _interrupt(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)
