"""The connection of an NRI plugin: two connections of ttrpc, one in each direction, on one socket.

A plugin of the Node Resource Interface calls the runtime and is called by it. The socket carries
frames of both connections::

    0               4               8
    ┌───────────────┬───────────────┬──────────┄
    │ connection id │ length        │ payload
    └───────────────┴───────────────┴──────────┄
      big endian      big endian

==  ==================  ====================
id  server              service
==  ==================  ====================
1   the plugin          Plugin
2   the runtime         Runtime
==  ==================  ====================

Rules
- The payloads of one id are a stream of bytes; a frame may end anywhere in a ttrpc message.
- The runtime's reader hands out whole frames to buffers of 4096 bytes, and breaks the connection
  over a frame that does not fit. The rest of a message whose start it has read fits always. So a
  message is sent as a frame of at most 4096 bytes and one of the rest, and a frame never has parts
  of two messages. It also keeps only 256 unread frames, so a message is not cut any finer.
- A frame of another id is dropped. One longer than any message of ttrpc ends the connection.

Source: github.com/containerd/nri pkg/net/multiplex; ttrpc's channel.go for the buffer.
"""

from __future__ import annotations

import socket
from struct import Struct
from typing import Final

from anyio.abc import TaskGroup

from api.ttrpc import frames
from api.ttrpc.calls import MAX_CALLS, Log
from api.ttrpc.client import Client
from api.ttrpc.errors import ConnectionClosed, RemoteProtocolError
from api.ttrpc.service import Credentials, Service
from api.ttrpc.session import Session
from api.ttrpc.transport import Transport

PLUGIN: Final = 1
RUNTIME: Final = 2
"""The ids of the connections, by who serves them."""

_HEADER: Final = Struct(">II")
_FIRST: Final = 4096
_LONGEST: Final = frames.HEADER_SIZE + frames.DATA_MAX


def encode(connection: int, message: bytes) -> bytes:
    """One message of ttrpc, ready to be sent.

    Args:
        connection: its id.
        message: the whole message, with its header.
    """
    parts = (message[:_FIRST], message[_FIRST:])
    return b"".join(_HEADER.pack(connection, len(part)) + part for part in parts if part)


class FrameReader:
    """Sorts a byte stream by connection, wherever it is split. It holds at most a header."""

    __slots__ = ("_header", "_id", "_left")

    def __init__(self) -> None:
        self._header = b""
        self._id = 0
        self._left = 0  # bytes of the frame that have not arrived yet

    def feed(self, received: bytes) -> list[tuple[int, bytes]]:
        """Take what was received.

        Returns:
            Pieces of the connections' streams, each with its id.

        Raises:
            RemoteProtocolError: a frame is longer than any message.
        """
        pieces = []
        while received:
            if self._left:
                piece, received = received[: self._left], received[self._left :]
                self._left -= len(piece)
                pieces.append((self._id, piece))
                continue
            lacking = _HEADER.size - len(self._header)
            self._header, received = self._header + received[:lacking], received[lacking:]
            if len(self._header) == _HEADER.size:
                self._id, self._left = _HEADER.unpack(self._header)
                self._header = b""
                if self._left > _LONGEST:
                    raise RemoteProtocolError(
                        "a frame of NRI", found=f"{self._left} bytes; ttrpc allows {_LONGEST}"
                    )
        return pieces


class Connection:
    """The connection of a plugin and a runtime, on which each serves and calls.

    Args:
        sock: connected; closed by :meth:`run`.
        peer: the process at its other end.
        service: what this end serves.
        log: where failures of its handlers are logged.
        tasks: where the connection is served, until :meth:`run` returns or this is cancelled.
        serves: the id of the connection that this end serves; a runtime's end is :data:`RUNTIME`.

    Attributes:
        client: calls the other end's service.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: Credentials,
        service: Service,
        log: Log,
        tasks: TaskGroup,
        *,
        serves: int = PLUGIN,
    ) -> None:
        self._transport = Transport(sock, tasks)
        self._tasks = tasks
        self._branches: dict[int, Transport] = {}
        self.client = Client(self._branch(PLUGIN if serves == RUNTIME else RUNTIME), tasks)
        services = {service.name: service}
        session = Session(self._branch(serves), peer, services, log, MAX_CALLS)
        tasks.start_soon(session.run)

    async def run(self) -> None:
        """Carry what both connections say, until the peer ends the connection.

        Raises:
            RemoteProtocolError: the peer broke the protocol.
        """
        reader = FrameReader()
        try:
            while received := await self._transport.receive():
                for connection, piece in reader.feed(received):
                    branch = self._branches.get(connection)
                    if branch is not None:
                        branch.write(piece)
                        await branch.room()
        except ConnectionClosed:  # a branch has ended, and with it the connection is of no use
            pass
        finally:
            self._close()

    def _branch(self, connection: int) -> socket.socket:
        """A socket that behaves as one that carries a single connection."""
        ours, theirs = socket.socketpair()
        self._branches[connection] = branch = Transport(ours, self._tasks)
        self._tasks.start_soon(self._send, connection, branch)
        return theirs

    async def _send(self, connection: int, branch: Transport) -> None:
        reader = frames.FrameReader()
        try:
            while sent := await branch.receive():
                for frame in reader.feed(sent):
                    if isinstance(frame, frames.Frame):  # ours are never too long
                        await self._transport.room()
                        self._transport.write(encode(connection, frames.encode(*frame)))
        except ConnectionClosed:
            pass
        self._close()  # the one is of no use without the other; run finds the end

    def _close(self) -> None:
        for each in (*self._branches.values(), self._transport):
            each.close()
