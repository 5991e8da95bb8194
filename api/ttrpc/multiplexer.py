"""One client's connection, shared by its calls.

Its task reads the connection, passes each event to its call, and informs all calls when the
connection is lost. Users use :mod:`api.ttrpc.client`.
"""

from __future__ import annotations

import socket
from typing import NamedTuple, Protocol, TypeAlias

import anyio
from anyio.abc import TaskGroup

from api.ttrpc.calls import CLOSED_HERE, connection_closed, why_ended
from api.ttrpc.connection import ClientConnection
from api.ttrpc.errors import ConnectionClosed
from api.ttrpc.events import DataReceived, Ended, ResponseReceived, StreamFailed
from api.ttrpc.inbox import ByteBudget
from api.ttrpc.streams import State
from api.ttrpc.transport import Transport

Answer: TypeAlias = "ResponseReceived | DataReceived | StreamFailed"


class Request(NamedTuple):
    """A request that opens a stream; ``timeout_nano`` in nanoseconds, 0 for none."""

    service: str
    method: str
    payload: bytes
    timeout_nano: int
    metadata: tuple[tuple[str, str], ...]
    state: State

    def __str__(self) -> str:
        return f"{self.service}/{self.method}"


class Call(Protocol):
    """Gets the server's messages on a stream."""

    async def take(self, answer: Answer) -> None:
        """Take a message from the server. May wait for a limited time, to slow the server down."""

    def lost(self, error: ConnectionClosed) -> None:
        """Handle the end of the connection, after which no answer comes."""


class Multiplexer:
    """Sends requests and distributes the answers.

    Args:
        sock: a connected stream socket; closed with the multiplexer.
        tasks: the group that reads the connection.
    """

    def __init__(self, sock: socket.socket, tasks: TaskGroup) -> None:
        self.budget = ByteBudget()
        self.closed = anyio.Event()
        self._connection = ClientConnection()
        self._transport = Transport(sock, tasks)
        self._calls: dict[int, tuple[str, Call]] = {}
        self._why = ""
        self._reading = anyio.CancelScope()
        tasks.start_soon(self._read)

    async def open(self, request: Request, call: Call) -> int:
        """Send a request; ``call`` receives the answers from now on.

        Args:
            request: the request.
            call: receives the answers.

        Returns:
            The stream's id, for the other methods.

        Raises:
            ConnectionClosed: the connection has ended.
            MessageTooLarge: the request is larger than 4 MiB.
        """
        asked = str(request)
        await self._room(asked)
        # No await between choosing an id and writing it, since ids must grow on the wire.
        stream_id, frame = self._connection.send_request(
            request.service,
            request.method,
            request.payload,
            timeout_nano=request.timeout_nano,
            metadata=request.metadata,
            state=request.state,
        )
        self._calls[stream_id] = (asked, call)
        try:
            self._write(asked, frame)
        except ConnectionClosed:
            self.forget(stream_id)
            raise
        return stream_id

    async def send(self, stream_id: int, payload: bytes) -> None:
        """Send one message on a stream; waits while the server does not read.

        Raises:
            ConnectionClosed: the connection has ended.
            LocalProtocolError: our side of the stream has ended, or takes no messages.
            MessageTooLarge: nothing was sent, and the stream can still be used.
            StreamClosed: the server has ended the stream.
        """
        asked = f"send on stream {stream_id}"
        await self._room(asked)
        self._write(asked, self._connection.send_data(stream_id, payload))

    async def finish(self, stream_id: int) -> None:
        """End our side of a stream. Raises the same errors as :meth:`send`."""
        asked = f"finish stream {stream_id}"
        await self._room(asked)
        self._write(asked, self._connection.send_end(stream_id))

    def give_up(self, stream_id: int) -> None:
        """Drop later answers on a stream."""
        self._connection.abandon(stream_id)

    def forget(self, stream_id: int) -> None:
        """End our side of an ended call's stream, and forget it."""
        if self._connection.may_send(stream_id) and not self.closed.is_set():
            try:
                self._write("end a stream", self._connection.send_end(stream_id))
            except ConnectionClosed:
                pass  # the server already knows
        self._connection.abandon(stream_id)
        self._calls.pop(stream_id, None)

    def close(self, why: str = CLOSED_HERE) -> None:
        """End the connection, and every running call with ``ConnectionClosed``."""
        if self.closed.is_set():
            return
        self._why = why
        self.closed.set()
        for asked, call in tuple(self._calls.values()):
            call.lost(connection_closed(asked, why))
        self._reading.cancel()
        self._transport.close()

    # A failed write ends only its own call. Other calls' answers may have arrived, so only the
    # reader, which finds the end after them, ends the connection.

    async def _room(self, asked: str) -> None:
        if self.closed.is_set():
            raise connection_closed(asked, self._why)
        try:
            await self._transport.room()
        except ConnectionClosed as error:
            raise connection_closed(asked, error.found) from None

    def _write(self, asked: str, frame: bytes) -> None:
        try:
            self._transport.write(frame)
        except ConnectionClosed as error:
            raise connection_closed(asked, error.found) from None

    async def _read(self) -> None:
        why = CLOSED_HERE
        try:
            with self._reading:
                why = await self._hand_out()
        finally:
            self.close(why)

    async def _hand_out(self) -> str:
        """Pass every answer to its call, until the end; return the reason for the end."""
        while True:
            for event in self._connection.receive_data(await self._transport.receive()):
                if isinstance(event, Ended):
                    return why_ended(event)
                if isinstance(event, (ResponseReceived, DataReceived, StreamFailed)):
                    _, call = self._calls.get(event.stream_id, ("", None))
                    if call is not None:
                        await call.take(event)
