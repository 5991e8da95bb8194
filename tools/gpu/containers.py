"""Containers for checks, on a private containerd."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tools.containerd import Completed, PrivateContainerd

IMAGE: Final = "nvshim.local/gpu:latest"

OURS: Final = "io.containerd.nvidia.v1"
STOCK: Final = "io.containerd.runc.v2"

DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
CAPABILITIES: Final = "NVIDIA_DRIVER_CAPABILITIES"

# A first CUDA context on a machine with many GPUs takes tens of seconds.
TIMEOUT: Final = 90.0


def asking(devices: str | None, capabilities: str = "compute,utility") -> tuple[str, ...]:
    """Return the flags of a container that requests GPUs; none if ``devices`` is None."""
    if devices is None:
        return ()
    return ("--env", f"{DEVICES}={devices}", "--env", f"{CAPABILITIES}={capabilities}")


@dataclass(frozen=True, slots=True)
class Container:
    """A running container."""

    owner: Containers
    name: str

    def exec(self, *command: str) -> Completed:
        """Run a command in it; an exit code other than 0 is not an error."""
        containerd = self.owner.containerd
        return containerd.ctr(
            "tasks", "exec", "--exec-id", self.owner.new_name("e"),
            "--fifo-dir", containerd.fifo_directory, self.name, *command,
            check=False, timeout=TIMEOUT,
        )  # fmt: skip

    @property
    def record(self) -> dict[str, Any]:
        """Return the engine's record of its grant; empty if there is none."""
        path = os.path.join(self.owner.containerd.bundle(self.name), "nvidia.json")
        try:
            with open(path, "rb") as file:
                record: dict[str, Any] = json.load(file)
        except FileNotFoundError:
            return {}
        return record

    def remove(self) -> None:
        """Stop and remove it. A missing container is not an error."""
        containerd = self.owner.containerd
        containerd.ctr("tasks", "rm", "--force", self.name, check=False)
        containerd.ctr("containers", "rm", self.name, check=False)


@dataclass(slots=True)
class Containers:
    """A containerd, and the way to start containers on it."""

    containerd: PrivateContainerd  # it runs, and has the image
    flags: tuple[str, ...] = ()  # more flags that ``ctr run`` needs on this machine
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def new_name(self, kind: str = "c") -> str:
        """Return a new, unique name."""
        return f"{kind}{next(self._numbers)}"

    def words(
        self, *command: str, flags: Sequence[str], name: str = "", runtime: str = OURS
    ) -> list[str]:
        """Return the arguments of ``ctr`` that run a container."""
        return [
            "run", "--runtime", runtime, "--fifo-dir", self.containerd.fifo_directory,
            *self.flags, *flags, IMAGE, name or self.new_name(), *command,
        ]  # fmt: skip

    def run(self, *command: str, flags: Sequence[str] = (), runtime: str = OURS) -> Completed:
        """Run a container and remove it; an exit code other than 0 is not an error."""
        words = self.words(*command, flags=("--rm", *flags), runtime=runtime)
        return self.containerd.ctr(*words, check=False, timeout=TIMEOUT)

    @contextlib.contextmanager
    def started(self, *, flags: Sequence[str] = (), runtime: str = OURS) -> Iterator[Container]:
        """Yield an idle container; remove it at the end.

        Raises:
            CtrFailed: it could not be started.
        """
        container = Container(self, self.new_name())
        words = self.words(
            "sleep", "100000", flags=("--detach", "--null-io", *flags), name=container.name,
            runtime=runtime,
        )  # fmt: skip
        try:
            self.containerd.ctr(*words, timeout=TIMEOUT)
            yield container
        finally:
            container.remove()

    def timed(self, *, flags: Sequence[str] = (), runtime: str = OURS) -> float:
        """Return the milliseconds of ``ctr run --rm`` of ``true``.

        Raises:
            CtrFailed: it failed.
        """
        words = self.words("true", flags=("--rm", *flags), runtime=runtime)
        began = time.perf_counter()
        self.containerd.ctr(*words, timeout=TIMEOUT)
        return (time.perf_counter() - began) * 1000
