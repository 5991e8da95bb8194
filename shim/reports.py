"""What containerd is told of a container: each thing that happens to it, as an event."""

from __future__ import annotations

from api.proto import events_pb2

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from shim.events import Publisher
    from shim.mounts import Mount
    from shim.process import Process

__all__ = ["Reports"]


class Reports:
    """The events of one container. When each is due is its container's to know.

    Args:
        publisher: who delivers them.
        container_id: the container's.
    """

    __slots__ = ("_id", "_publisher")

    def __init__(self, publisher: Publisher, container_id: str) -> None:
        self._publisher = publisher
        self._id = container_id

    def created(
        self, init: Process, bundle: str, rootfs_mounts: Sequence[Mount], checkpoint: str
    ) -> None:
        """The container exists."""
        uris = init.uris
        event = events_pb2.TaskCreate(
            container_id=self._id,
            bundle=bundle,
            io=events_pb2.TaskIO(
                stdin=uris.stdin, stdout=uris.stdout, stderr=uris.stderr, terminal=uris.terminal
            ),
            checkpoint=checkpoint,
            pid=init.pid,
        )
        for kind, source, target, options in rootfs_mounts:
            event.rootfs.add(type=kind, source=source, target=target, options=options)
        self._publish(event)

    def started(self, init: Process) -> None:
        """Init runs."""
        self._publish(events_pb2.TaskStart(container_id=self._id, pid=init.pid))

    def exec_added(self, exec_id: str) -> None:
        """There is an exec, to be started later."""
        self._publish(events_pb2.TaskExecAdded(container_id=self._id, exec_id=exec_id))

    def exec_started(self, process: Process) -> None:
        """An exec runs."""
        self._publish(
            events_pb2.TaskExecStarted(
                container_id=self._id, exec_id=process.exec_id, pid=process.pid
            )
        )

    def paused(self) -> None:
        """The container stands still."""
        self._publish(events_pb2.TaskPaused(container_id=self._id))

    def resumed(self) -> None:
        """It goes on."""
        self._publish(events_pb2.TaskResumed(container_id=self._id))

    def checkpointed(self, path: str) -> None:
        """It was saved in a directory."""
        self._publish(events_pb2.TaskCheckpointed(container_id=self._id, checkpoint=path))

    def out_of_memory(self) -> None:
        """The kernel has killed a process of it for want of memory."""
        self._publish(events_pb2.TaskOOM(container_id=self._id))

    def exited(self, process: Process) -> None:
        """Init or an exec has ended, which whoever waits for it learns with this."""
        child = process.child
        if child is None or child.exit is None:
            message = "an exit is published after it happened"
            raise AssertionError(message)
        event = events_pb2.TaskExit(
            container_id=self._id, id=process.id, pid=child.pid, exit_status=child.exit.status
        )
        event.exited_at.FromNanoseconds(child.exit.at)
        self._publish(event)
        process.finish(child.exit)

    def deleted(self, init: Process) -> None:
        """The container is gone."""
        exit_ = init.exit
        event = events_pb2.TaskDelete(container_id=self._id, pid=init.pid)
        if exit_ is not None:
            event.exit_status = exit_.status
            event.exited_at.FromNanoseconds(exit_.at)
        self._publish(event)

    def _publish(self, event: Any) -> None:
        self._publisher.publish(self._id, event)
