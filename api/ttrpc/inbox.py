"""What a peer has sent on one stream and nobody has read yet, within limits.

ttrpc has no flow control per stream. Whoever reads the connection puts messages here and,
when an inbox is full, stops reading the whole connection for a moment: that is the only way to
tell the sender. If its reader does not make room in :data:`PATIENCE` seconds the stream is
given up, so that it cannot hold up the others for longer. (The Go server waits as long.)
"""

from __future__ import annotations

from collections import deque

from api import aio

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

PATIENCE: Final = 1.0

_MESSAGES: Final = 64
_BYTES: Final = 1 << 20
# Over all streams of a connection, requests that are being handled included.
_BYTES_PER_CONNECTION: Final = 16 << 20


class Holdings:
    """The account of one connection: how many bytes of its peer's we hold.

    Args:
        limit: in bytes; above it no more should be taken.
    """

    __slots__ = ("_held", "_limit", "_released")

    def __init__(self, limit: int = _BYTES_PER_CONNECTION) -> None:
        self._limit = limit
        self._held = 0
        self._released: aio.Event | None = None

    @property
    def full(self) -> bool:
        """Whether more is held than the limit."""
        return self._held > self._limit

    def take(self, size: int) -> None:
        """So many bytes more are held."""
        self._held += size

    def release(self, size: int) -> None:
        """So many bytes fewer are."""
        self._held -= size
        if self._released is not None:
            self._released.set()
            self._released = None

    async def released(self) -> None:
        """Wait until something is released."""
        if self._released is None:
            self._released = aio.Event()
        await self._released.wait()


class Inbox:
    """Messages of one stream, for one reader.

    Args:
        holdings: the account of the connection.
    """

    __slots__ = ("_arrived", "_bytes", "_ended", "_error", "_holdings", "_messages")

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._messages: deque[bytes] = deque()
        self._bytes = 0
        self._ended = False
        self._error: Exception | None = None
        self._arrived: aio.Event | None = None

    @property
    def full(self) -> bool:
        """Whether its reader should catch up before more is put in."""
        return bool(self._messages) and (
            len(self._messages) >= _MESSAGES or self._bytes > _BYTES or self._holdings.full
        )

    def put(self, message: bytes) -> None:
        """Add a message. After the end it is dropped."""
        if not self._ended:
            self._messages.append(message)
            self._bytes += len(message)
            self._holdings.take(len(message))
            self._wake()

    def end(self, error: Exception | None = None) -> None:
        """No more will come; what is here can still be read. The first end counts.

        Args:
            error: raised to the reader after the last message, in place of ``EndOfStream``.
        """
        if not self._ended:
            self._ended = True
            self._error = error
            self._wake()

    def clear(self) -> None:
        """Drop what nobody will read, and take no more."""
        self.end()
        self._messages.clear()
        self._holdings.release(self._bytes)
        self._bytes = 0

    async def get(self) -> bytes:
        """The next message, encoded.

        Raises:
            aio.EndOfStream: there will be none.
            Exception: what :meth:`end` was given.
        """
        while not self._messages:
            if self._ended:
                raise self._error or aio.EndOfStream
            if self._arrived is None:
                self._arrived = aio.Event()
            await self._arrived.wait()
        message = self._messages.popleft()
        self._bytes -= len(message)
        self._holdings.release(len(message))
        return message

    async def room(self) -> bool:
        """Wait, for a bounded time, until the reader has caught up.

        Returns:
            Whether it has.
        """
        with aio.move_on_after(PATIENCE):
            while self.full:
                await self._holdings.released()
        return not self.full

    def _wake(self) -> None:
        if self._arrived is not None:
            self._arrived.set()
            self._arrived = None
