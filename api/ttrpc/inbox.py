"""The unread messages of one stream, within limits.

ttrpc has no flow control per stream. The reader of the connection puts messages here. When an inbox
is full, it briefly stops reading the whole connection, the only way to slow the sender down. If the
stream's reader makes no room within :data:`PATIENCE` seconds, the stream is abandoned, so that it
no longer delays the others. (The Go server waits as long.)
"""

from __future__ import annotations

from collections import deque
from typing import Final

import anyio

from api.ttrpc import calls

PATIENCE: Final = 1.0

_MESSAGES: Final = 64
_BYTES: Final = 1 << 20


class ByteBudget(calls.ByteBudget):
    """A :class:`api.ttrpc.calls.ByteBudget` on which tasks can wait for a release."""

    __slots__ = ("_released",)

    def __init__(self, limit: int = calls.MAX_BYTES) -> None:
        super().__init__(limit)
        self._released: anyio.Event | None = None

    def release(self, size: int) -> None:
        """Count bytes that are no longer held."""
        super().release(size)
        if self._released is not None:
            self._released.set()
            self._released = None

    async def released(self) -> None:
        """Wait until bytes are released."""
        if self._released is None:
            self._released = anyio.Event()
        await self._released.wait()


class Inbox:
    """Messages of one stream, for one reader.

    Args:
        budget: the budget of the connection.
    """

    __slots__ = ("_arrived", "_budget", "_bytes", "_ended", "_error", "_messages")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._messages: deque[bytes] = deque()
        self._bytes = 0
        self._ended = False
        self._error: Exception | None = None
        self._arrived: anyio.Event | None = None

    @property
    def full(self) -> bool:
        """Whether the sender should wait for the reader."""
        return bool(self._messages) and (
            len(self._messages) >= _MESSAGES or self._bytes > _BYTES or self._budget.full
        )

    def put(self, message: bytes) -> None:
        """Add a message. After the end, messages are dropped."""
        if not self._ended:
            self._messages.append(message)
            self._bytes += len(message)
            self._budget.take(len(message))
            self._wake()

    def end(self, error: Exception | None = None) -> None:
        """End the inbox. Messages in it can still be read. Only the first call has an effect.

        Args:
            error: raised for the reader after the last message, instead of ``EndOfStream``.
        """
        if not self._ended:
            self._ended = True
            self._error = error
            self._wake()

    def clear(self) -> None:
        """Drop the unread messages, and end the inbox."""
        self.end()
        self._messages.clear()
        self._budget.release(self._bytes)
        self._bytes = 0

    async def get(self) -> bytes:
        """Return the next message, encoded.

        Raises:
            anyio.EndOfStream: the stream has no more messages.
            Exception: the error passed to :meth:`end`.
        """
        while not self._messages:
            if self._ended:
                raise self._error or anyio.EndOfStream
            if self._arrived is None:
                self._arrived = anyio.Event()
            await self._arrived.wait()
        message = self._messages.popleft()
        self._bytes -= len(message)
        self._budget.release(len(message))
        return message

    async def room(self) -> bool:
        """Wait for a limited time until the reader has caught up.

        Returns:
            Whether it has.
        """
        with anyio.move_on_after(PATIENCE):
            while self.full:
                await self._budget.released()
        return not self.full

    def _wake(self) -> None:
        if self._arrived is not None:
            self._arrived.set()
            self._arrived = None
