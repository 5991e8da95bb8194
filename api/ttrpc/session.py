"""One accepted connection: reads it, runs its handlers, sends their answers.

Rules
- Every request runs in a task of its own, so a slow one holds up nobody; those of immediate
  handlers, which cannot be slow, are answered while they are read.
- When the client is gone its handlers are cancelled. What must not be left half done shields
  itself (``aio.CancelScope(shield=True)``).
- An exception of a handler is an answer, never the end of the connection.
- Equal requests of a shared method are one call, and answered together.
- Beyond :data:`MAX_CALLS` requests under way, or too many bytes of them, further ones are refused.
  Those of a service's ``unlimited`` methods never are, and do not count: a client that has
  abandoned thousands of Waits must still be able to Kill.
- A client that does not read its answers is not read from either, so what we keep for it stays
  bounded: by :mod:`api.ttrpc.transport` on the way out, by :mod:`api.ttrpc.inbox` on the way in.
"""

from __future__ import annotations

import math

from google.protobuf.message import DecodeError, Message

from api import aio
from api.errors import NvshimError, describe_bug
from api.ttrpc.connection import ServerConnection
from api.ttrpc.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    HandlerFailed,
    LocalProtocolError,
    MessageTooLarge,
    Overloaded,
    RemoteError,
    RemoteProtocolError,
    ShuttingDown,
    StreamClosed,
    UndecodableMessage,
    Unimplemented,
)
from api.ttrpc.events import DataReceived, Ended, RequestReceived, StreamFailed
from api.ttrpc.inbox import PATIENCE, Holdings, Inbox
from api.ttrpc.service import Context
from api.ttrpc.streams import State
from api.ttrpc.transport import Transport

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable, Mapping
    from typing import Any, Final

    from api.ttrpc.service import Credentials, Handler, Method, Service

    Log = Callable[[str, Mapping[str, object]], None]
    # Service, method and message of requests that are equal.
    Same = tuple[str, str, bytes]

# Requests under way at once on one connection: far above what an honest peer needs.
MAX_CALLS: Final = 1024

_NANOSECONDS: Final = 1e9

# After how many answers to one call the loop gets its turn.
_TURN: Final = 64


class Asked:
    """What a request asks for."""

    __slots__ = ("context", "method", "stream_id")

    def __init__(self, stream_id: int, method: Method, context: Context) -> None:
        self.stream_id = stream_id
        self.method = method
        self.context = context

    def __str__(self) -> str:
        return f"{self.context.service}/{self.method.name}"


class Call(Asked):
    """One request and everything that belongs to it while it runs in a task.

    Attributes:
        counts: whether it is one of those of which there may be so many.
        shared: what is asked, if others that ask the same are to have its answer.
        others: their streams.
    """

    __slots__ = ("counts", "handler", "inbox", "others", "payload", "scope", "shared")

    def __init__(
        self,
        stream_id: int,
        method: Method,
        handler: Handler,
        context: Context,
        *,
        counts: bool,
    ) -> None:
        super().__init__(stream_id, method, context)
        self.handler = handler
        self.payload = b""
        self.inbox: Inbox | None = None
        self.counts = counts
        self.shared: Same | None = None
        self.others: list[int] = []
        self.scope = aio.CancelScope(deadline=context.deadline)


class Session:
    """A connection that has been accepted and whose peer may speak to us.

    Args:
        sock: the connection; closed by :meth:`run`.
        peer: its other end.
        services: by name.
        log: where failures of handlers are told.
        max_calls: requests at once.
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
        self._peer = peer
        self._services = services
        self._log = log
        self._connection = ServerConnection()
        self._max_calls = max_calls
        self._holdings = Holdings()
        self._calls: dict[int, Call] = {}
        self._counted = 0
        self._shared: dict[Same, Call] = {}
        self._reading = aio.CancelScope()
        self._draining = False

    async def run(self) -> None:
        """Serve the connection until its client is gone or, after :meth:`drain`, is answered."""
        try:
            async with aio.create_task_group() as tasks:
                self._tasks = tasks
                self._transport = Transport(self._sock, tasks)
                with self._reading:
                    await self._read()
                    tasks.cancel_scope.cancel()
                await self._transport.flushed()
        finally:
            self._sock.close()

    def drain(self) -> None:
        """Take no new requests, and end when those under way are answered."""
        self._draining = True
        if not self._calls:
            self._reading.cancel()

    async def _read(self) -> None:
        """Read until the client is gone."""
        transport, connection = self._transport, self._connection
        try:
            while True:
                for event in connection.receive_data(await transport.receive()):
                    # The classes are final, and the chain is in the order of frequency.
                    if isinstance(event, RequestReceived):
                        self._accept(event)
                    elif isinstance(event, DataReceived):
                        await self._deliver(event)
                    elif isinstance(event, StreamFailed):
                        self._give_up(event)
                    elif isinstance(event, Ended):
                        if event.error:
                            self._log("a client broke off", {"error": str(event.error)})
                        return
                await transport.room()
        except ConnectionClosed:
            return

    def _accept(self, event: RequestReceived) -> None:
        """Answer a request, start it, or refuse it."""
        if not self._connection.is_live(event.stream_id):
            return  # broken by what came in the same read, and answered with that
        if self._answer_at_once(event) or self._join(event):
            return
        try:
            call = self._call_for(event)
        except NvshimError as error:
            self._send_error(event.stream_id, error)
            return
        self._calls[event.stream_id] = call
        if call.shared is not None:
            self._shared[call.shared] = call
        self._counted += call.counts
        self._holdings.take(len(call.payload))
        self._tasks.start_soon(self._run, call)

    def _answer_at_once(self, event: RequestReceived) -> bool:
        """Answer a request that needs no waiting; says whether it was one."""
        service = self._services.get(event.service)
        known = service.immediate.get(event.method) if service is not None else None
        # An answer that would have to be kept for a client that does not read waits in a task.
        if known is None or self._transport.crowded:
            return False
        method, handler = known
        asked = Asked(event.stream_id, method, self._context(event))
        outcome: bytes | NvshimError
        try:
            request = _decode(method.request, event.payload, asked)
            outcome = _encode(handler(asked.context, request), asked)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is its answer
            outcome = self._failure(asked, error)
        self._send_outcome(asked.stream_id, outcome)
        return True

    def _join(self, event: RequestReceived) -> bool:
        """Have a request answered with an equal one, if that is under way; says whether it is."""
        if self._draining or event.timeout_nano:
            return False
        call = self._shared.get((event.service, event.method, event.payload))
        if call is not None:
            call.others.append(event.stream_id)
        return call is not None

    def _context(self, event: RequestReceived) -> Context:
        timeout, deadline = None, math.inf
        if event.timeout_nano:
            timeout = event.timeout_nano / _NANOSECONDS
            deadline = aio.current_time() + timeout
        return Context(
            event.service,
            event.method,
            event.metadata,
            timeout=timeout,
            deadline=deadline,
            peer=self._peer,
        )

    def _call_for(self, event: RequestReceived) -> Call:
        asked = f"{event.service}/{event.method}"
        if self._draining:
            raise ShuttingDown(asked, found="a server that is shutting down")
        service = self._services.get(event.service)
        if service is None:
            raise Unimplemented(asked, found=f"service {event.service} is not implemented")
        known = service.methods.get(event.method)
        if known is None:
            raise Unimplemented(asked, found=f"method {event.method} is not implemented")
        counts = event.method not in service.unlimited
        if counts:
            self._refuse_beyond_limit(asked)
        method, handler = known
        if method.server_streaming and event.state is State.UNARY:
            raise RemoteProtocolError(
                asked, found="a unary call of a method that streams its answer"
            )
        call = Call(event.stream_id, method, handler, self._context(event), counts=counts)
        if not method.streaming:
            call.payload = event.payload
            if event.method in service.shared and not event.timeout_nano:
                call.shared = (event.service, event.method, event.payload)
            return call
        inbox = call.inbox = Inbox(self._holdings)
        # The first message may come with the request; where the client streams, "no bytes"
        # means "no message", where it does not, an empty one. (As the Go server does.)
        if event.payload or not method.client_streaming:
            inbox.put(event.payload)
        if event.state is not State.OPEN or not method.client_streaming:
            inbox.end()
        return call

    def _refuse_beyond_limit(self, asked: str) -> None:
        found = ""
        if self._counted >= self._max_calls:
            found = f"{self._max_calls} requests under way on this connection"
        elif self._holdings.full:
            found = "too many bytes of this client's requests under way"
        if found:
            raise Overloaded(asked, found=found, do="wait for an answer first")

    async def _deliver(self, event: DataReceived) -> None:
        """Put a message where its handler finds it."""
        call = self._calls.get(event.stream_id)
        if call is None or call.inbox is None:
            return
        if event.payload is not None:
            call.inbox.put(event.payload)
        if event.end:
            call.inbox.end()
        if call.inbox.full and not await call.inbox.room():
            error = Overloaded(
                str(call), found=f"a handler that has not read its stream for {PATIENCE:g} s"
            )
            self._send_error(event.stream_id, error)
            call.scope.cancel()

    def _give_up(self, event: StreamFailed) -> None:
        """A stream the peer has broken: say so, and stop its handler."""
        self._write(event.reply)
        call = self._calls.get(event.stream_id)
        if call is not None and call.shared is None:
            call.scope.cancel()

    async def _run(self, call: Call) -> None:
        """Handle one request and answer it."""
        size = len(call.payload)
        try:
            outcome: bytes | NvshimError | None = None
            with call.scope:
                outcome = await self._outcome(call)
            if call.shared is not None:
                del self._shared[call.shared]  # who asks from now on may get another answer
            # A stream that the peer has broken is answered and over; else it was the deadline.
            if call.scope.cancelled_caught and self._connection.is_live(call.stream_id):
                outcome = DeadlineExceeded(
                    str(call), found=f"no answer in the client's {call.context.timeout:g} s"
                )
            await self._answer(call, outcome)
        finally:
            self._counted -= call.counts
            self._holdings.release(size)
            if call.inbox is not None:
                call.inbox.clear()
            del self._calls[call.stream_id]
            if self._draining and not self._calls:
                self._reading.cancel()

    async def _outcome(self, call: Call) -> bytes | NvshimError | None:
        """What the handler makes of a request: a message, a failure, or the end of a stream."""
        method = call.method
        try:
            # Requests of a client that leaves its answers unread wait here: one read of the
            # socket can hold a thousand of them, and their answers would have to be kept.
            await self._transport.room()
            if call.inbox is None:
                request = _decode(method.request, call.payload, call)
                call.payload = b""
                response = await call.handler(call.context, request)
            else:
                stream = ServerStream(self._connection, self._transport, call, call.inbox)
                response = await call.handler(call.context, stream)
            if method.server_streaming and response is None:
                return None
            return _encode(response, call)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is its answer
            return self._failure(call, error)
        except aio.get_cancelled_exc_class():
            # Ours has to go on; one that the handler let escape from a task of its own has not.
            if aio.current_effective_deadline() == -math.inf:
                raise
            return self._failure(call, RuntimeError("something it waited for was cancelled"))

    def _failure(self, asked: Asked, raised: Exception) -> NvshimError:
        """What went wrong, as an error that can be sent; what nobody foresaw is logged."""
        error: BaseException = raised
        # A handler's own task group wraps even a single, well-typed failure.
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if isinstance(error, NvshimError) and not isinstance(error, HandlerFailed):
            return error
        if not isinstance(error, HandlerFailed):
            error = HandlerFailed(str(asked), found=f"{type(error).__name__}: {error}")
        self._log(
            "a handler failed",
            {
                "method": str(asked),
                "error": str(error),
                "traceback": describe_bug(raised),
            },
        )
        return error

    async def _answer(self, call: Call, outcome: bytes | NvshimError | None) -> None:
        try:
            await self._transport.room()
            self._send_outcome(call.stream_id, outcome)
            for number, stream_id in enumerate(call.others, 1):
                if number % _TURN == 0:
                    await aio.checkpoint()
                await self._transport.room()
                self._send_outcome(stream_id, outcome)
        except ConnectionClosed:
            return

    def _send_outcome(self, stream_id: int, outcome: bytes | NvshimError | None) -> None:
        if not self._connection.is_live(stream_id):
            return
        if isinstance(outcome, NvshimError):
            self._send_error(stream_id, outcome)
        elif outcome is None:
            self._write(self._connection.send_end(stream_id))
        else:
            try:
                frame = self._connection.send_response(stream_id, outcome)
            except MessageTooLarge as error:
                self._send_error(stream_id, error)
            else:
                self._write(frame)

    def _send_error(self, stream_id: int, error: NvshimError) -> None:
        details = error.details if isinstance(error, RemoteError) else ()
        message = error.message if isinstance(error, RemoteError) else str(error)
        self._write(self._connection.send_error(stream_id, error.status, message, details))

    def _write(self, frame: bytes) -> None:
        try:
            self._transport.write(frame)
        except ConnectionClosed:
            # The reader learns it too and ends the connection with everything that runs on it.
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
        return _decode(self._call.method.request, await self._inbox.get(), self._call)

    async def send(self, message: Message) -> None:
        """See :meth:`api.ttrpc.service.Stream.send`."""
        call = self._call
        if not call.method.server_streaming:
            raise LocalProtocolError(f"send on {call}", found="a method that does not stream")
        if not isinstance(message, call.method.response):
            raise LocalProtocolError(
                f"send on {call}",
                found=f"{type(message).__name__}, not {call.method.response.__name__}",
            )
        await self._transport.room()
        if not self._connection.is_live(call.stream_id):
            raise StreamClosed(f"send on {call}", found="the stream is over")
        self._transport.write(
            self._connection.send_data(call.stream_id, message.SerializeToString())
        )

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.receive()
        except aio.EndOfStream:
            raise StopAsyncIteration from None


def _decode(type_: type[Message], payload: bytes, asked: Asked) -> Message:
    try:
        return type_.FromString(payload)
    except DecodeError:
        raise UndecodableMessage(
            f"{type_.DESCRIPTOR.full_name} for {asked}",
            found=f"{len(payload)} bytes that are none",
        ) from None


def _encode(response: Message | None, asked: Asked) -> bytes:
    method = asked.method
    if not isinstance(response, method.response):
        raise HandlerFailed(
            str(asked), found=f"{type(response).__name__}, not {method.response.__name__}"
        )
    return response.SerializeToString()
