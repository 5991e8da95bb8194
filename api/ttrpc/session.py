"""An accepted connection: reads it, runs its handlers, sends their answers.

The rules are those of :mod:`api.ttrpc.calls`. Data for a client that does not read is limited: by
:mod:`api.ttrpc.transport` on the way out, by :mod:`api.ttrpc.inbox` on the way in.
"""

from __future__ import annotations

import math
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

import anyio
import anyio.lowlevel
from google.protobuf.message import Message

from api.ttrpc.calls import TURN, Call, Calls, Log, Outcome, decode
from api.ttrpc.connection import ServerConnection
from api.ttrpc.errors import ConnectionClosed, LocalProtocolError, Overloaded, StreamClosed
from api.ttrpc.events import DataReceived, Ended, RequestReceived, StreamFailed
from api.ttrpc.inbox import PATIENCE, ByteBudget, Inbox
from api.ttrpc.service import Credentials, Service
from api.ttrpc.streams import State
from api.ttrpc.transport import Transport


class Session:
    """An accepted connection with a permitted peer.

    Args:
        sock: the connection; closed by :meth:`run`.
        peer: the process at the other end.
        services: the services by name.
        log: the log for failures of handlers.
        max_calls: the maximum number of requests in progress.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: Credentials,
        services: Mapping[str, Service],
        log: Log,
        max_calls: int,
    ) -> None:
        self._sock = sock
        self._log = log
        self._budget = ByteBudget()
        self._calls = Calls(
            services,
            peer,
            log,
            now=anyio.current_time,
            max_calls=max_calls,
            budget=self._budget,
            streams=True,
        )
        self._reading = anyio.CancelScope()

    async def run(self) -> None:
        """Serve the connection until its client leaves or, after :meth:`drain`, is answered."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self._transport = Transport(self._sock, tasks)
                with self._reading:
                    await self._read()
                    tasks.cancel_scope.cancel()
                await self._transport.flushed()
        finally:
            self._sock.close()

    def drain(self) -> None:
        """Accept no new requests, and end once the running ones are answered."""
        self._calls.draining = True
        self._end_if_drained()

    def _end_if_drained(self) -> None:
        if self._calls.draining and not self._calls.by_stream:
            self._reading.cancel()

    async def _read(self) -> None:
        """Read until the client disconnects."""
        transport, connection = self._transport, self._calls.connection
        try:
            while True:
                for event in connection.receive_data(await transport.receive()):
                    # The classes are final, and tested in the order of frequency.
                    if isinstance(event, RequestReceived):
                        self._accept(event)
                    elif isinstance(event, DataReceived):
                        await self._deliver(event)
                    elif isinstance(event, StreamFailed):
                        self._write(event.reply)
                        broken = self._calls.broken(event)
                        if broken is not None:
                            broken.scope.cancel()
                    elif isinstance(event, Ended):
                        if event.error:
                            self._log("a client broke off", {"error": str(event.error)})
                        return
                await transport.room()
        except ConnectionClosed:
            return

    def _accept(self, event: RequestReceived) -> None:
        """Answer a request, or start its task."""
        call = self._calls.accept(event, crowded=self._transport.crowded)
        if isinstance(call, bytes):
            self._write(call)
            return
        call.scope = anyio.CancelScope(deadline=call.context.deadline)
        if call.method.streaming:
            inbox = call.inbox = Inbox(self._budget)
            # The first message may come with the request. No bytes mean no message if the client
            # streams, and otherwise an empty message. (The Go server does the same.)
            if event.payload or not call.method.client_streaming:
                inbox.put(event.payload)
            if event.state is not State.OPEN or not call.method.client_streaming:
                inbox.end()
        self._tasks.start_soon(self._run, call)

    async def _deliver(self, event: DataReceived) -> None:
        """Pass a message to its handler's inbox."""
        call = self._calls.by_stream.get(event.stream_id)
        if call is None or call.inbox is None:
            return
        if event.payload is not None:
            call.inbox.put(event.payload)
        if event.end:
            call.inbox.end()
        if call.inbox.full and not await call.inbox.room():
            found = f"a handler that has not read its stream for {PATIENCE:g} s"
            error = Overloaded(str(call.context), found=found)
            self._write(self._calls.answer(event.stream_id, error))
            call.scope.cancel()

    async def _run(self, call: Call) -> None:
        """Handle one request and answer it."""
        calls = self._calls
        try:
            outcome: Outcome = None
            with call.scope:
                outcome = await self._outcome(call)
            calls.unshare(call)  # later requests may get different answers
            # The peer has broken the stream, which is answered; otherwise it was the deadline.
            if call.scope.cancelled_caught and calls.connection.is_live(call.stream_id):
                outcome = calls.too_late(call)
            await self._answer(call, outcome)
        finally:
            calls.ended(call)
            if call.inbox is not None:
                call.inbox.clear()
            self._end_if_drained()

    async def _outcome(self, call: Call) -> Outcome:
        """Return a handler's result for a request: a message, a failure, or a stream's end."""
        stream = None
        if call.inbox is not None:
            stream = ServerStream(self._calls.connection, self._transport, call, call.inbox)
        try:
            # Requests of a client that does not read its answers wait here: one read of the socket
            # can return a thousand of them, whose answers would take memory.
            await self._transport.room()
        except ConnectionClosed:
            return None
        try:
            outcome: Outcome = None
            with anyio.CancelScope(shield=call.method.name in call.service.shielded):
                outcome = await self._calls.handle(call, stream)
        except anyio.get_cancelled_exc_class():
            # Our own cancellation must continue; one from a task of the handler's must not.
            if anyio.current_effective_deadline() == -math.inf:
                raise
            return self._calls.escaped(call)
        return outcome

    async def _answer(self, call: Call, outcome: Outcome) -> None:
        try:
            for number, stream_id in enumerate((call.stream_id, *(call.others or ()))):
                if number and number % TURN == 0:
                    await anyio.lowlevel.checkpoint()
                await self._transport.room()
                self._write(self._calls.answer(stream_id, outcome))
        except ConnectionClosed:
            return

    def _write(self, frame: bytes) -> None:
        try:
            if frame:
                self._transport.write(frame)
        except ConnectionClosed:
            # The reader notices it, too, and ends the connection with everything on it.
            return


class ServerStream:
    """The :class:`api.ttrpc.service.Stream` that a streaming handler gets."""

    __slots__ = ("_call", "_connection", "_inbox", "_transport")

    def __init__(
        self, connection: ServerConnection, transport: Transport, call: Call, inbox: Inbox
    ) -> None:
        self._connection = connection
        self._transport = transport
        self._call = call
        self._inbox = inbox

    async def receive(self) -> Any:
        """See :meth:`api.ttrpc.service.Stream.receive`."""
        return decode(self._call.method.request, await self._inbox.get(), self._call.context)

    async def send(self, message: Message) -> None:
        """See :meth:`api.ttrpc.service.Stream.send`."""
        call = self._call
        if not call.method.server_streaming:
            raise LocalProtocolError(
                f"send on {call.context}", found="a method that does not stream"
            )
        if not isinstance(message, call.method.response):
            raise LocalProtocolError(
                f"send on {call.context}",
                found=f"{type(message).__name__}, not {call.method.response.__name__}",
            )
        await self._transport.room()
        if not self._connection.is_live(call.stream_id):
            raise StreamClosed(f"send on {call.context}", found="the stream has ended")
        self._transport.write(
            self._connection.send_data(call.stream_id, message.SerializeToString())
        )

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None
