"""ttrpc on the shim's loop: a server, and a client for containerd. Only unary calls.

Both use the core of :mod:`api.ttrpc`, whose rules are in :mod:`api.ttrpc.calls`, with as little
memory and time per connection as possible: a connection is one object and no task. The loop calls
it when bytes arrive; only a handler that must wait gets a task.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable
from types import TracebackType
from typing import Final, Self, TypeVar

from google.protobuf.message import Message

from api.errors import describe_bug
from api.ttrpc import sockets
from api.ttrpc.calls import (
    CLOSED_HERE,
    MAX_CALLS,
    TURN,
    Call,
    Calls,
    Log,
    Outcome,
    check_status,
    connection_closed,
    decode,
    nanoseconds,
    no_answer,
    why_ended,
)
from api.ttrpc.connection import ClientConnection
from api.ttrpc.errors import LocalProtocolError, PeerRejected
from api.ttrpc.events import Ended, RequestReceived, ResponseReceived, StreamFailed
from api.ttrpc.service import Credentials, Service
from shim import loop

R = TypeVar("R", bound=Message)

# Seconds: between attempts to accept when descriptors are scarce, and for running requests when the
# server stops.
_PAUSE: Final = 0.1
_GRACE: Final = 5.0

# Seconds: for a connect, and between attempts while the server's backlog is full.
_CONNECT: Final = 5.0
_FULL: Final = 0.01


class Server:
    """Serves services.

    Args:
        services: the services; their names must differ.
        log: called with an event and its fields for errors that no client sees: a rejected peer, an
            unexpected exception in a handler.
        max_calls: the most requests of one connection in progress.

    Attributes:
        services: the services by name.
        log: see above.
        max_calls: see above.
        sessions: the open connections.
        tasks: the group in which handlers run; None unless the server runs.

    Raises:
        LocalProtocolError: two services have the same name.
    """

    def __init__(
        self, services: Iterable[Service], *, log: Log | None = None, max_calls: int = MAX_CALLS
    ) -> None:
        self.services: dict[str, Service] = {}
        for service in services:
            if service.name in self.services:
                raise LocalProtocolError(f"serve {service.name}", found="it is served already")
            self.services[service.name] = service
        self.log: Log = log or (lambda _, __: None)
        self.max_calls = max_calls
        self.sessions: set[Session] = set()
        self.tasks: loop.TaskGroup | None = None
        self._left = loop.Event()
        self._stopped = loop.Event()
        self._accepting = loop.CancelScope()
        self._closing = False
        self._grace = _GRACE

    async def serve(self, listener: socket.socket) -> None:
        """Accept and serve connections until :meth:`close` or :meth:`shutdown` is called.

        Args:
            listener: a listening unix socket, closed when this returns; the caller removes its
                file.

        Raises:
            LocalProtocolError: the server is already running.
            OSError: the listener failed.
        """
        if self.tasks is not None:
            raise LocalProtocolError("serve a listener", found="this server has one already")
        listener.setblocking(False)
        failure: OSError | None = None
        try:
            async with loop.TaskGroup() as self.tasks:
                try:
                    with self._accepting:
                        if not self._closing:
                            failure = await self._accept(listener)
                    # From now on clients are refused at once instead of waiting in the backlog.
                    listener.close()
                    self._limit(self._grace)
                    while self.sessions and failure is None:
                        await self._wait_for_leaver()
                finally:
                    for session in tuple(self.sessions):
                        session.hang_up()
        finally:
            listener.close()
            for session in tuple(self.sessions):
                session.hang_up()
            self.tasks = None
            self._stopped.set()
        if failure is not None:
            raise failure

    def close(self, grace: float = _GRACE) -> None:
        """Start to stop, and return at once. For handlers such as ``Shutdown``.

        No new connection is accepted, and no request started. Idle connections close now, the
        others after their last answer. Then :meth:`serve` returns. Until then, immediate handlers
        (a second ``Shutdown``) still answer.

        Args:
            grace: seconds after which remaining requests are cancelled without an answer.
        """
        if self._closing:
            return
        self._closing = True
        self._grace = grace
        self._accepting.cancel()
        for session in tuple(self.sessions):
            session.drain()

    async def shutdown(self, grace: float = _GRACE) -> None:
        """Call :meth:`close`, and wait until :meth:`serve` is about to return. Not for handlers.

        Args:
            grace: seconds, as for :meth:`close`. A second call can only shorten this time.
        """
        self.close(grace)
        if self.tasks is not None:
            self._limit(grace)
            await self._stopped.wait()

    async def wait_deserted(self) -> None:
        """Wait until no client is connected."""
        while self.sessions:
            await self._wait_for_leaver()

    def left(self, session: Session) -> None:
        """Handle the end of a session."""
        self.sessions.discard(session)
        self._left.set()

    async def _wait_for_leaver(self) -> None:
        self._left = loop.Event()
        await self._left.wait()

    def _limit(self, grace: float) -> None:
        if self.tasks is not None:
            scope = self.tasks.cancel_scope
            scope.deadline = min(scope.deadline, loop.current_time() + grace)

    async def _accept(self, listener: socket.socket) -> OSError:
        """Accept connections until the listener fails; return its error."""
        is_short = False  # of descriptors; logged once per shortage
        while True:
            await loop.wait_readable(listener)
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                if error.errno in sockets.PASSING:
                    if not is_short:
                        self.log("cannot accept a connection now", {"error": str(error)})
                    is_short = True
                    await loop.sleep(_PAUSE)
                elif error.errno not in sockets.ABORTED:
                    return error
                continue
            is_short = False
            try:
                self.sessions.add(Session(sock, sockets.check_peer(sock), self))
            except (PeerRejected, OSError) as error:
                sock.close()
                self.log("a connection was rejected", {"error": str(error)})


class Session(loop.Channel):
    """An accepted connection.

    Args:
        sock: the connection; closed when it has ended.
        peer: the client's process.
        server: the server whose services it calls.
    """

    __slots__ = ("_busy", "_calls", "_gone", "_scope", "_server")

    def __init__(self, sock: socket.socket, peer: Credentials, server: Server) -> None:
        super().__init__(sock)
        self._server = server
        self._calls = Calls(
            server.services, peer, server.log, now=loop.current_time, max_calls=server.max_calls
        )
        # The scope of its tasks, created for the first.
        self._scope: loop.CancelScope | None = None
        self._busy = False
        self._gone = False

    def drain(self) -> None:
        """Start no new requests, and end once the running ones are answered."""
        self._calls.draining = True
        self._end_if_idle()

    def hang_up(self) -> None:
        """Cancel running requests, and end after them."""
        if not self._gone:
            self._gone = True
            self.stop_reading()
            if self._scope is not None:
                self._scope.cancel()
        self._end_if_idle()

    def received(self, data: bytes) -> None:
        """Answer, start or refuse new requests."""
        self._busy = True
        tasks = self._server.tasks
        if tasks is None:
            self._calls.draining = True
        try:
            for event in self._calls.connection.receive_data(data):
                if isinstance(event, RequestReceived):
                    call = self._calls.accept(event, crowded=self.crowded)
                    if isinstance(call, Call):
                        self._start(call, tasks)
                    elif call:
                        self.write(call)
                elif isinstance(event, StreamFailed):
                    self.write(event.reply)
                    broken = self._calls.broken(event)
                    if broken is not None:
                        broken.scope.cancel()
                elif isinstance(event, Ended):
                    if event.error:
                        self._server.log("a client broke off", {"error": str(event.error)})
                    self.hang_up()
        finally:
            self._busy = False
        self._end_if_idle()

    def failed(self, error: Exception) -> None:
        """Log a bug in this connection, which must not end the others."""
        self._server.log("a connection failed", {"traceback": describe_bug(error)})
        self.hang_up()

    def flushed(self) -> None:
        """Note that everything was sent; end the connection if this was its last task."""
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._calls.by_stream or self._busy:
            return
        if self._gone or (self._calls.draining and not self.kept):
            self.close()
            if self._scope is not None:
                self._scope.dissolve()
                self._scope = None
            self._server.left(self)
        elif self._calls.draining:
            self.stop_reading()

    def _start(self, call: Call, tasks: loop.TaskGroup | None) -> None:
        if tasks is None:
            message = "a server that does not serve starts no call"
            raise AssertionError(message)
        if self._scope is None:
            self._scope = loop.CancelScope.below(tasks.cancel_scope)
        call.scope = loop.CancelScope.below(self._scope, deadline=call.context.deadline)
        tasks.start_in(
            call.scope,
            self._run(call),
            lambda raised: self._ended(call, raised),
            name=str(call.context),
        )

    async def _run(self, call: Call) -> None:
        """Handle a request and answer it."""
        calls = self._calls
        try:
            # Requests of a client that does not read its answers wait here: one read of the socket
            # can return a thousand of them, whose answers would take memory.
            await self.room()
            if call.method.name in call.service.shielded:
                with loop.CancelScope(shield=True):
                    outcome = await calls.handle(call)
            else:
                outcome = await calls.handle(call)
        except loop.Cancelled:
            # This task's cancellation continues; one that escaped from another is a failure.
            if call.scope.effectively_cancelled:
                raise
            outcome = calls.escaped(call)
        call.scope.deadline = math.inf
        calls.unshare(call)  # later requests may get different answers
        for number, stream_id in enumerate((call.stream_id, *(call.others or ()))):
            if number and number % TURN == 0:
                await loop.checkpoint()
            await self.room()
            self._answer(stream_id, outcome)

    def _ended(self, call: Call, raised: BaseException | None) -> BaseException | None:
        """Handle the end of a task; return an error for the server to raise."""
        self._calls.ended(call)
        timed_out = call.scope.cancel_called and call.scope.deadline < math.inf
        call.scope.dissolve()
        if isinstance(raised, loop.Cancelled):
            raised = None
            # A stream that the client has broken is already answered.
            if timed_out and not self._gone and call.context.timeout is not None:
                self._answer(call.stream_id, self._calls.too_late(call))
        elif isinstance(raised, Exception):
            self.failed(raised)
            raised = None
        self._end_if_idle()
        return raised

    def _answer(self, stream_id: int, outcome: Outcome) -> None:
        frame = self._calls.answer(stream_id, outcome)
        if frame:
            self.write(frame)


class _Pending:
    """A call that waits for its answer; None if the connection is lost first."""

    __slots__ = ("answer", "done")

    def __init__(self) -> None:
        self.answer: ResponseReceived | StreamFailed | None = None
        self.done = loop.Event()


class Client(loop.Channel):
    """A connection to a server, closed at the end of a ``with``.

    Args:
        sock: a connected socket; the client closes it.
    """

    __slots__ = ("_calls", "_lost", "_protocol")

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._protocol = ClientConnection()
        self._calls: dict[int, _Pending] = {}
        self._lost = ""

    @classmethod
    async def connect(cls, path: str, *, timeout: float = _CONNECT) -> Self:
        """Connect to a unix socket.

        Args:
            path: the path of the socket, with or without ``unix://`` before it.
            timeout: seconds to wait while the server's backlog is full.

        Raises:
            ConnectFailed: no server listens there, or it did not accept in time.
        """
        deadline = loop.current_time() + timeout
        while (sock := sockets.connect(path)) is None:
            if loop.current_time() >= deadline:
                raise sockets.backlog_full(path, timeout)
            await loop.sleep(_FULL)
        return cls(sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether the connection has ended, so that every call fails."""
        return bool(self._lost)

    async def call(
        self,
        service: str,
        method: str,
        request: Message,
        response_type: type[R],
        *,
        timeout: float | None = None,
        metadata: Iterable[tuple[str, str]] = (),
    ) -> R:
        """Call a method. If the call is cancelled, a later answer is dropped.

        Args:
            service: the full name, such as ``containerd.task.v2.Task``.
            method: the name, such as ``State``.
            request: the request message.
            response_type: the response's class.
            timeout: the time limit in seconds, for both sides; None for no limit.
            metadata: pairs of key and value; keys may repeat.

        Raises:
            RemoteError: the server answered with a status other than OK.
            DeadlineExceeded: no answer came within ``timeout``.
            ConnectionClosed: the connection was lost during the call or before it.
            MessageTooLarge: the request or the response is larger than 4 MiB.
            RemoteProtocolError: the answer violates the protocol.
        """
        asked = f"{service}/{method}"
        pending = _Pending()
        with loop.move_on_after(timeout) as scope:
            response = await self._exchange(
                asked,
                pending,
                (service, method, request.SerializeToString()),
                nanoseconds(timeout),
                metadata,
            )
        if scope.cancelled_caught:
            raise no_answer(asked, timeout)
        check_status(response, asked, timeout)
        return decode(response_type, response.payload, asked)

    async def _exchange(
        self,
        asked: str,
        pending: _Pending,
        request: tuple[str, str, bytes],
        timeout_nano: int,
        metadata: Iterable[tuple[str, str]],
    ) -> ResponseReceived:
        await self.room()
        if self._lost:
            raise connection_closed(asked, self._lost)
        stream_id, frame = self._protocol.send_request(
            *request, timeout_nano=timeout_nano, metadata=metadata
        )
        self._calls[stream_id] = pending
        try:
            self.write(frame)
            await pending.done.wait()
        finally:
            self._protocol.abandon(stream_id)
            self._calls.pop(stream_id, None)
        if pending.answer is None:
            raise connection_closed(asked, self._lost)
        if isinstance(pending.answer, StreamFailed):
            raise pending.answer.error
        return pending.answer

    def received(self, data: bytes) -> None:
        """Pass answers to their calls."""
        for event in self._protocol.receive_data(data):
            if isinstance(event, Ended):
                self._lose(why_ended(event))
            elif isinstance(event, (ResponseReceived, StreamFailed)):
                pending = self._calls.get(event.stream_id)
                if pending is not None:
                    pending.answer = event
                    pending.done.set()

    def failed(self, error: Exception) -> None:
        """End the connection, whose state is unknown."""
        self._lose(describe_bug(error))

    def close(self) -> None:
        """End the connection; running calls fail with ``ConnectionClosed``."""
        self._lose(CLOSED_HERE)

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost = why
            super().close()
            for pending in self._calls.values():
                pending.done.set()
