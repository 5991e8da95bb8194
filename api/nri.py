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
- The payloads with one id form a stream of bytes; a frame may end anywhere in a ttrpc message.
- The runtime's reader copies whole frames into buffers of 4096 bytes, and closes the connection if
  a frame does not fit. After the start of a message, the rest always fits. So a message is sent as
  one frame of at most 4096 bytes and one for the rest, and a frame never contains parts of two
  messages. There are no more frames, because the reader keeps only 256 unread ones.
- A frame with another id is dropped. A frame longer than any ttrpc message ends the connection.

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
"""The ids of the connections, by server."""

_HEADER: Final = Struct(">II")
_FIRST: Final = 4096
_LONGEST: Final = frames.HEADER_SIZE + frames.DATA_MAX


def encode(connection: int, message: bytes) -> bytes:
    """Return one ttrpc message, ready to send.

    Args:
        connection: the id of its connection.
        message: the whole message, with its header.
    """
    parts = (message[:_FIRST], message[_FIRST:])
    return b"".join(_HEADER.pack(connection, len(part)) + part for part in parts if part)


class FrameReader:
    """Sorts a byte stream by connection, however it is split. It keeps at most one header."""

    __slots__ = ("_header", "_id", "_left")

    def __init__(self) -> None:
        self._header = b""
        self._id = 0
        self._left = 0  # missing bytes of the frame

    def feed(self, received: bytes) -> list[tuple[int, bytes]]:
        """Process received bytes.

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
        sock: a connected socket, which :meth:`run` closes.
        peer: the process at the other end.
        service: the service of this end.
        log: the log for failures of its handlers.
        tasks: the group that serves it, until :meth:`run` returns or the group is cancelled.
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
        """Run both connections until the peer closes the socket.

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
        except ConnectionClosed:  # a branch has ended, so the connection is useless
            pass
        finally:
            self._close()

    def _branch(self, connection: int) -> socket.socket:
        """Return a socket that behaves as if it carried only a single connection."""
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
        self._close()  # one branch is useless without the other; run finds the end

    def _close(self) -> None:
        for each in (*self._branches.values(), self._transport):
            each.close()
