"""Events that every listener receives, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Generic, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

T = TypeVar("T")

# Events that a slow listener can be behind; it misses newer ones.
_BACKLOG: Final = 1024


class Broadcast(Generic[T]):
    """Sends each event to everyone who listens at that time. Use it from one event loop only.

    Args:
        on_send: called with each event, with or without listeners.
    """

    def __init__(self, on_send: Callable[[T], object] = lambda _: None) -> None:
        self._on_send = on_send
        self._streams: set[MemoryObjectSendStream[T]] = set()

    @property
    def has_listeners(self) -> bool:
        """Whether there are listeners."""
        return bool(self._streams)

    def send(self, event: T) -> None:
        """Send an event to all listeners; a full backlog drops it for that listener."""
        self._on_send(event)
        for stream in self._streams:
            try:
                stream.send_nowait(event)
            except anyio.WouldBlock:
                continue

    @contextmanager
    def listen(self) -> Iterator[MemoryObjectReceiveStream[T]]:
        """Receive all events from now on, until the context ends."""
        send, receive = anyio.create_memory_object_stream[T](_BACKLOG)
        self._streams.add(send)
        try:
            yield receive
        finally:
            self._streams.discard(send)
            send.close()
            receive.close()
