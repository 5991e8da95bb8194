"""A unix socket as a transport: reading, writing without partial frames, back-pressure.

Writing has two parts. :meth:`Transport.write` never waits: it passes bytes to the kernel at once
(one system call for a response, no task switch), and keeps the rest for a temporary task. So a
cancelled caller leaves no partial frame behind, and frames reach the wire in the order of the
calls. :meth:`Transport.room` waits while too much is kept: call it before producing bytes.
"""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
from anyio.abc import TaskGroup

from api.ttrpc.errors import ConnectionClosed

# The size of reads, below glibc's threshold for a separate mapping.
_READ_SIZE: Final = 64 << 10
# Bytes kept for a peer that does not read until producers must wait.
_ROOM: Final = 1 << 20


class Transport:
    """A connected stream socket, owned by this object.

    Args:
        sock: the socket, which becomes non-blocking.
        tasks: the group that finishes writes; it must outlive the transport.
    """

    __slots__ = (
        "_broken",
        "_closed",
        "_drained",
        "_kept",
        "_sock",
        "_tasks",
        "_unsent",
        "_waiting",
    )

    def __init__(self, sock: socket.socket, tasks: TaskGroup) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._tasks = tasks
        self._unsent: deque[bytes | memoryview] = deque()
        self._kept = 0
        self._drained: anyio.Event | None = None
        # Why sending fails. The peer's earlier bytes may still be readable.
        self._broken = ""
        self._closed = False
        # Tasks that wait for the socket's number, which must not be reused meanwhile.
        self._waiting = 0

    async def receive(self) -> bytes:
        """Wait for bytes and return them; ``b""`` at the end or when the connection is lost."""
        # Always wait first: a peer that sends without pause must not block the loop for the others.
        while await self._ready(anyio.wait_readable):
            try:
                return self._sock.recv(_READ_SIZE)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                self._break(error)
                return b""
        return b""

    def write(self, data: bytes) -> None:
        """Send data, now or when the kernel accepts it; never waits.

        Args:
            data: whole frames.

        Raises:
            ConnectionClosed: the peer is gone.
        """
        self._check()
        if self._unsent:
            self._unsent.append(data)
            self._kept += len(data)
            return
        try:
            sent = self._sock.send(data, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._break(error)
            self._check()
            return
        if sent < len(data):
            self._unsent.append(memoryview(data)[sent:])
            self._kept = len(data) - sent
            self._tasks.start_soon(self._finish)

    @property
    def crowded(self) -> bool:
        """Whether it keeps so much that :meth:`room` would wait."""
        return self._kept > _ROOM

    async def room(self) -> None:
        """Wait while too much data is kept for a peer that does not read fast enough.

        Raises:
            ConnectionClosed: the peer is gone.
        """
        while self.crowded:
            await self._progress()
        self._check()

    async def flushed(self) -> None:
        """Wait until the kernel has everything, or the peer is gone."""
        while self._kept:
            await self._progress()

    def close(self) -> None:
        """Close the socket; kept bytes are lost, and :meth:`receive` sees the end."""
        self._closed = True
        self._broken = self._broken or "it was closed on this side"
        self._forget()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the tasks that wait for it
        except OSError:
            pass  # the peer has closed it first
        self._close_unless_waiting()

    async def _ready(self, wait: Callable[[socket.socket], Awaitable[None]]) -> bool:
        """Wait for the socket; return whether it is still open."""
        if self._closed:
            return False
        self._waiting += 1
        try:
            await wait(self._sock)
        finally:
            self._waiting -= 1
            self._close_unless_waiting()
        return not self._closed

    def _close_unless_waiting(self) -> None:
        if self._closed and not self._waiting:
            self._sock.close()

    async def _progress(self) -> None:
        if self._drained is None:
            self._drained = anyio.Event()
        await self._drained.wait()

    async def _finish(self) -> None:
        """Send the kept bytes until none are left."""
        unsent = self._unsent
        while unsent and await self._ready(anyio.wait_writable):
            try:
                while unsent:
                    sent = self._sock.send(unsent[0], socket.MSG_NOSIGNAL)
                    self._kept -= sent
                    if sent < len(unsent[0]):
                        unsent[0] = memoryview(unsent[0])[sent:]
                    else:
                        unsent.popleft()
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                self._break(error)
            if self._kept <= _ROOM:
                self._tell()

    def _check(self) -> None:
        if self._broken:
            raise ConnectionClosed("send", found=self._broken, do="connect again")

    def _break(self, error: OSError) -> None:
        self._broken = errno.errorcode.get(error.errno or 0, "") or str(error)
        self._forget()

    def _forget(self) -> None:
        self._unsent.clear()
        self._kept = 0
        self._tell()

    def _tell(self) -> None:
        if self._drained is not None:
            self._drained.set()
            self._drained = None
