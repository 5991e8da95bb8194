"""State that all containers of a shim share."""

from __future__ import annotations

from typing import Any, Protocol

from google.protobuf.message import Message

from shim.children import Reaper
from shim.log import Log
from shim.loop import Tasks


class Publisher(Protocol):
    """Delivers events to containerd: :class:`shim.pod.events.Publisher`."""

    def publish(self, container_id: str, event: Message) -> None:
        """Queue one event, and return at once."""

    @property
    def waiting(self) -> int:
        """The number of undelivered events."""


class Moves(Protocol):
    """Moves between cgroups: :class:`shim.cgroup.moves.ExpectedMoves`."""

    def expect(self) -> None:
        """Let the kernel prepare for the move that a runtime is about to make."""


class RuntimeCall(Protocol):
    """A low-level runtime's options: :class:`shim.runtime.options.RuntimeOptions`."""

    @property
    def binary_name(self) -> str:
        """The runtime's name or path."""

    @property
    def root(self) -> str:
        """Its state directory, with one directory for each namespace."""

    @property
    def systemd_cgroup(self) -> bool:
        """Whether systemd creates its cgroups."""


class PodSandbox(Protocol):
    """The sandbox as the pod's containers see it: :class:`shim.sandbox.sandbox.Sandbox`."""

    def enter(self, container_id: str, bundle: str, options: RuntimeCall) -> None:
        """Record how to end a container of the pod, before it exists."""

    def leave(self, container_id: str) -> None:
        """Remove that record."""

    def refuse_if_closed(self, container_id: str) -> None:
        """Refuse a container of a pod that is stopping or stopped."""

    def admit(self, spec: dict[str, Any]) -> bool:
        """Add what the pod's containers share to a spec; return whether it changed."""


class ShimContext:
    """The state that all containers of a shim share.

    Args:
        namespace: containerd's namespace.
        reaper: collects the shim's children.
        publisher: delivers events to containerd.
        tasks: the group in which background tasks run.
        log: the shim's log.
        moves: the moves between cgroups that the containers' runtimes are about to make.

    Attributes:
        sandbox: the pod's sandbox, if this shim holds it.
    """

    __slots__ = ("log", "moves", "namespace", "publisher", "reaper", "sandbox", "tasks")

    def __init__(
        self,
        *,
        namespace: str,
        reaper: Reaper,
        publisher: Publisher,
        tasks: Tasks,
        log: Log,
        moves: Moves,
    ) -> None:
        self.namespace = namespace
        self.reaper = reaper
        self.publisher = publisher
        self.tasks = tasks
        self.log = log
        self.moves = moves
        self.sandbox: PodSandbox | None = None
