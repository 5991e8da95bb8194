"""A connected stream socket that the loop reads without a task.

A subclass gets what arrives in :meth:`Channel.received`. :meth:`Channel.write` never waits: it
passes the bytes to the kernel, and keeps what the kernel does not take. While more than a megabyte
is kept, the channel is not read: a peer that does not read its answers gets no further requests in.
"""

from __future__ import annotations

import socket
from collections import deque
from typing import Final

from shim.loop import core
from shim.loop.descriptors import ENDS, READ, WRITE
from shim.loop.groups import Event

# One read; below glibc's threshold for a mapping of its own.
_READ_SIZE: Final = 64 << 10
# Bytes kept for a peer that does not read before the channel is crowded.
_ROOM: Final = 1 << 20


class Channel:
    """See the module.

    Args:
        sock: connected; made non-blocking here, and closed by :meth:`close`.

    Raises:
        OSError: it cannot be watched.
    """

    __slots__ = ("_drained", "_events", "_fd", "_kept", "_reading", "_sock", "_unsent")

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        self._unsent: deque[bytes | memoryview] | None = None
        self._kept = 0
        self._drained: Event | None = None
        self._reading = True
        self._events = READ
        core.watch(self._fd, self._ready, READ)

    def received(self, data: bytes) -> None:
        """Bytes have arrived; none at the end of the connection, which is told once."""
        raise NotImplementedError

    def failed(self, error: Exception) -> None:
        """:meth:`received` has raised."""
        raise NotImplementedError

    def flushed(self) -> None:
        """The kernel has taken everything that was kept."""

    @property
    def crowded(self) -> bool:
        """Whether too much is kept for a peer that does not read."""
        return self._kept > _ROOM

    @property
    def kept(self) -> int:
        """How many bytes the kernel has not taken yet."""
        return self._kept

    async def room(self) -> None:
        """Wait while it is crowded. Also returns when the connection is lost."""
        while self.crowded:
            if self._drained is None:
                self._drained = Event()
            await self._drained.wait()

    def write(self, data: bytes) -> None:
        """Send bytes, now or when the kernel takes them.

        If the peer is gone they are dropped; :meth:`received` reports the end.
        """
        if self._fd < 0:
            return
        if self._unsent:
            self._unsent.append(data)
            self._kept += len(data)
        else:
            sent = self._send(data)
            if sent == len(data):
                return
            if self._unsent is None:
                self._unsent = deque()
            self._unsent.append(memoryview(data)[sent:])
            self._kept = len(data) - sent
        self._update()

    def stop_reading(self) -> None:
        """Read no more; what is kept is still sent."""
        self._reading = False
        self._update()

    def close(self) -> None:
        """Close the socket; what is kept is dropped."""
        if self._fd < 0:
            return
        self._reading = False
        self._drop()
        self._update()
        self._fd = -1
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # a child may hold a duplicate
        except OSError:
            pass  # the peer was faster
        self._sock.close()

    def _ready(self, events: int) -> None:
        try:
            if self._unsent and events & (WRITE | ENDS):
                self._flush()
            if self._events & READ and events & (READ | ENDS):
                try:
                    data = self._sock.recv(_READ_SIZE)
                except (BlockingIOError, InterruptedError):
                    return
                except OSError:
                    data = b""
                if not data:
                    self.stop_reading()
                self.received(data)
        except Exception as error:  # noqa: BLE001 - one connection's failure does not end the loop
            self.failed(error)

    def _flush(self) -> None:
        unsent = self._unsent
        while unsent:
            sent = self._send(unsent[0])
            if sent == len(unsent[0]):
                self._kept -= sent
                unsent.popleft()
            elif sent:
                self._kept -= sent
                unsent[0] = memoryview(unsent[0])[sent:]
            else:
                break
        if not unsent:
            self._drop()
        elif not self.crowded:
            self._wake()
        self._update()
        if not self._kept:
            self.flushed()

    def _send(self, data: bytes | memoryview) -> int:
        """Pass bytes to the kernel; returns how many it took, all if the peer is gone."""
        try:
            return self._sock.send(data, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(data)

    def _drop(self) -> None:
        self._unsent = None
        self._kept = 0
        self._wake()

    def _wake(self) -> None:
        if self._drained is not None:
            self._drained.set()
            self._drained = None

    def _update(self) -> None:
        # Unwatched if it wants nothing: a hangup would be reported in every turn.
        events = READ if self._reading and not self.crowded else 0
        if self._unsent:
            events |= WRITE
        if events == self._events:
            return
        self._events = events
        if events:
            core.watch(self._fd, self._ready, events)
        else:
            core.unwatch(self._fd)
