"""Deliver events to containerd in order, and wait for containerd while it is unavailable.

Rules
- Events of one container are delivered in the order in which they happened; containers do not
  wait for each other.
- An event that cannot be delivered stays at the head of its container's queue. Whatever the error,
  it is tried again, with growing pauses, while this process lives, because containerd may be
  restarting. A shim without tasks gives up after a while (:mod:`shim.pod.service`). (containerd's
  own shim gives up after five tries, and the task is shown as running for ever.)
- The shim waits for an answer while the connection exists. A stopped or overloaded containerd reads
  the event later; if it were sent again, it would arrive twice.
- An event that containerd refuses as malformed is logged and dropped, so that later events arrive.
- While containerd is unavailable, a container may run out of memory repeatedly. One such event at
  the end of a queue stands for all later ones.
- The time in the envelope is the time of the event, not of its delivery.

Source: containerd docs/runtime-v2.md (events), api/services/ttrpc/events/v1/events.proto.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Final

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from api import typeurl
from api.errors import Status
from api.proto import events_pb2, events_service_pb2, types_pb2
from api.ttrpc import MessageTooLarge, RemoteError
from shim import loop
from shim.log import Log
from shim.loop import Tasks
from shim.pod.ttrpc import Client

_SERVICE: Final = "containerd.services.events.ttrpc.v1.Events"
_NAMESPACE_KEY: Final = "containerd-namespace-ttrpc"

# Seconds: the first pause after a failure, and the longest one.
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 5.0

TOPICS: Final = {
    events_pb2.TaskCreate: "/tasks/create",
    events_pb2.TaskStart: "/tasks/start",
    events_pb2.TaskExit: "/tasks/exit",
    events_pb2.TaskDelete: "/tasks/delete",
    events_pb2.TaskExecAdded: "/tasks/exec-added",
    events_pb2.TaskExecStarted: "/tasks/exec-started",
    events_pb2.TaskPaused: "/tasks/paused",
    events_pb2.TaskResumed: "/tasks/resumed",
    events_pb2.TaskOOM: "/tasks/oom",
    events_pb2.TaskCheckpointed: "/tasks/checkpointed",
}


class Publisher:
    """Delivers events to containerd's ttrpc socket.

    Args:
        address: the path of that socket; "" if containerd named none, to drop events.
        namespace: containerd's namespace of this shim.
        tasks: the group in which deliveries run.
        log: the log for failures, one entry per outage.
    """

    def __init__(self, address: str, namespace: str, tasks: Tasks, log: Log) -> None:
        self._address = address
        self._namespace = namespace
        self._tasks = tasks
        self._log = log
        self._queues: dict[str, deque[types_pb2.Envelope]] = {}
        self._client: Client | None = None
        self._connecting = loop.Lock()
        self._idle = loop.Event()
        self._idle.set()

    def publish(self, container_id: str, event: Message) -> None:
        """Queue one event, and return at once.

        Args:
            container_id: the container whose queue it joins.
            event: one of the messages of ``TOPICS``.
        """
        if not self._address:
            return
        queue = self._queues.get(container_id)
        if isinstance(event, events_pb2.TaskOOM) and _ends_out_of_memory(queue):
            return
        envelope = types_pb2.Envelope(
            namespace=self._namespace, topic=TOPICS[type(event)], event=typeurl.pack(event)
        )
        envelope.timestamp.FromNanoseconds(time.time_ns())
        if queue is not None:
            queue.append(envelope)
            return
        if not self._queues:
            self._idle = loop.Event()
        self._queues[container_id] = deque([envelope])
        self._tasks.start_soon(self._deliver, container_id)

    @property
    def waiting(self) -> int:
        """The number of undelivered events."""
        return sum(map(len, self._queues.values()))

    async def drain(self, seconds: float) -> bool:
        """Wait for a limited time until all events are delivered.

        Args:
            seconds: the time limit.

        Returns:
            Whether everything was delivered.
        """
        with loop.move_on_after(seconds):
            await self._idle.wait()
        return not self._queues

    def close(self) -> None:
        """End the connection; undelivered events are lost."""
        if self._client is not None:
            self._client.close()

    async def _deliver(self, container_id: str) -> None:
        queue = self._queues[container_id]
        pause = _FIRST_PAUSE
        while queue:
            try:
                await self._forward(queue[0])
            except Exception as error:  # noqa: BLE001 - no error may end the pod
                if _is_final(error):
                    self._log.error(
                        "an event was refused",
                        topic=queue[0].topic,
                        id=container_id,
                        why=str(error),
                    )
                    queue.popleft()
                    continue
                if pause == _FIRST_PAUSE:
                    why = str(error) or type(error).__name__
                    self._log.warning("an event waits for containerd", why=why)
                await loop.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
            else:
                queue.popleft()
                pause = _FIRST_PAUSE
        del self._queues[container_id]
        if not self._queues:
            self._idle.set()

    async def _forward(self, envelope: types_pb2.Envelope) -> None:
        client = await self._connected()
        await client.call(
            _SERVICE,
            "Forward",
            events_service_pb2.ForwardRequest(envelope=envelope),
            Empty,
            metadata=((_NAMESPACE_KEY, self._namespace),),
        )

    async def _connected(self) -> Client:
        async with self._connecting:
            if self._client is None or self._client.closed:
                self._client = await Client.connect(self._address)
            return self._client


def _ends_out_of_memory(queue: deque[types_pb2.Envelope] | None) -> bool:
    """Whether the last waiting event is out of memory, and is not being delivered."""
    return queue is not None and len(queue) > 1 and queue[-1].topic == TOPICS[events_pb2.TaskOOM]


def _is_final(error: Exception) -> bool:
    """Whether an event would fail with this error each time."""
    if isinstance(error, RemoteError):
        return error.status == Status.INVALID_ARGUMENT
    return isinstance(error, MessageTooLarge)
