"""A ttrpc client on a unix socket.

One task reads the connection; any number of tasks may call at the same time. When the connection is
lost, every call in progress fails at once with :class:`~api.ttrpc.errors.ConnectionClosed`. A
client does not reconnect by itself: only its owner knows which requests can be repeated.
"""

from __future__ import annotations

import math
import socket
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import anyio
from anyio.abc import TaskGroup
from google.protobuf.message import Message

from api.ttrpc import sockets
from api.ttrpc.calls import check_status, decode, nanoseconds, no_answer
from api.ttrpc.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    LocalProtocolError,
    Overloaded,
    TtrpcError,
)
from api.ttrpc.events import ResponseReceived, StreamFailed
from api.ttrpc.inbox import PATIENCE, Inbox
from api.ttrpc.multiplexer import Answer, Multiplexer, Request
from api.ttrpc.service import Method
from api.ttrpc.streams import State

R = TypeVar("R", bound=Message)

_CONNECT: Final = 5.0  # seconds
_PAUSE: Final = 0.01  # seconds between attempts at a full backlog


async def dial(path: str, *, timeout: float = _CONNECT) -> socket.socket:
    """Return a connected socket, for a :class:`Client` in the caller's own task group.

    Args:
        path: the path of a unix socket, with or without ``unix://`` before it.
        timeout: seconds to wait while the server's backlog is full.

    Returns:
        The socket, non-blocking and not inherited by children.

    Raises:
        ConnectFailed: no server listens there, or it did not accept in time.
    """
    deadline = anyio.current_time() + timeout
    while (sock := sockets.connect(path)) is None:
        if anyio.current_time() >= deadline:
            raise sockets.backlog_full(path, timeout)
        await anyio.sleep(_PAUSE)
    return sock


class Client:
    """The client's end of a connection.

    Args:
        sock: a connected stream socket, see :func:`dial`; the client closes it.
        tasks: the group that reads the connection, until it is closed or the group is cancelled.
    """

    def __init__(self, sock: socket.socket, tasks: TaskGroup) -> None:
        self._multiplexer = Multiplexer(sock, tasks)

    @property
    def closed(self) -> bool:
        """Whether the connection has ended, so that every call fails."""
        return self._multiplexer.closed.is_set()

    async def wait_closed(self) -> None:
        """Wait until the connection has ended, on either side."""
        await self._multiplexer.closed.wait()

    def close(self) -> None:
        """End the connection; running calls fail with ``ConnectionClosed``."""
        self._multiplexer.close()

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
        """Call a unary method.

        If the caller is cancelled, the connection remains usable: the server continues (ttrpc has
        no message to stop it), and a later answer is dropped.

        Args:
            service: the full name, such as ``containerd.task.v2.Task``.
            method: the name, such as ``State``.
            request: the request message.
            response_type: the response's class.
            timeout: the time limit in seconds, for both sides; None for no limit.
            metadata: pairs of key and value; keys may repeat.

        Returns:
            The response.

        Raises:
            RemoteError: the server answered with a status other than OK.
            DeadlineExceeded: no answer came within ``timeout``.
            ConnectionClosed: the connection was lost during the call or before it.
            MessageTooLarge: the request or the response is larger than 4 MiB.
            RemoteProtocolError: the answer violates the protocol.
        """
        asked = Request(
            service,
            method,
            request.SerializeToString(),
            nanoseconds(timeout),
            tuple(metadata),
            State.UNARY,
        )
        answer: ResponseReceived | None = None
        with anyio.CancelScope(deadline=_deadline(timeout)):
            answer = await self._exchange(asked)
        if answer is None:
            raise no_answer(asked, timeout)
        check_status(answer, asked, timeout)
        return decode(response_type, answer.payload, asked)

    def stream(
        self,
        service: str,
        method: Method,
        request: Message | None = None,
        *,
        timeout: float | None = None,
        metadata: Iterable[tuple[str, str]] = (),
    ) -> ClientStream:
        """Call a method that streams, in an ``async with``.

        Args:
            service: the full name.
            method: its name, classes and directions, see :meth:`Method.of`.
            request: the request, if only the server streams. Otherwise send it on the stream.
            timeout: the time limit in seconds for the whole ``async with``; None for no limit.
                After it, the block is cancelled and raises ``DeadlineExceeded``.
            metadata: pairs of key and value; keys may repeat.

        Returns:
            The call, not yet made.

        Raises:
            LocalProtocolError: the client streams but there is a request, or it does not and there
                is none.
        """
        if (request is None) != method.client_streaming:
            raise LocalProtocolError(
                f"{service}/{method.name}",
                found="a request is passed here only if the client does not stream",
            )
        asked = Request(
            service,
            method.name,
            b"" if request is None else request.SerializeToString(),
            nanoseconds(timeout),
            tuple(metadata),
            State.OPEN if method.client_streaming else State.CLIENT_CLOSED,
        )
        return ClientStream(self._multiplexer, method, asked, timeout)

    async def _exchange(self, asked: Request) -> ResponseReceived:
        call = _UnaryCall()
        stream_id = await self._multiplexer.open(asked, call)
        try:
            await call.done.wait()
        finally:
            self._multiplexer.forget(stream_id)
        if isinstance(call.outcome, ResponseReceived):
            return call.outcome
        raise call.outcome


class _UnaryCall:
    """A call that waits for its one answer."""

    __slots__ = ("done", "outcome")

    outcome: ResponseReceived | TtrpcError

    def __init__(self) -> None:
        self.done = anyio.Event()

    async def take(self, answer: Answer) -> None:
        """Take the answer; the core passes no data to a unary stream."""
        if isinstance(answer, StreamFailed):
            self.outcome = answer.error
        elif isinstance(answer, ResponseReceived):
            self.outcome = answer
        self.done.set()

    def lost(self, error: ConnectionClosed) -> None:
        """Handle the loss of the connection; an answer that came before still counts."""
        if not self.done.is_set():
            self.outcome = error
            self.done.set()


class ClientStream:
    """A call that streams; made by :meth:`Client.stream`, opened by ``async with``.

    Leaving the block abandons the call in any state: the server learns that we have finished, and
    its later messages are dropped.
    """

    def __init__(
        self, multiplexer: Multiplexer, method: Method, asked: Request, timeout: float | None
    ) -> None:
        self._multiplexer = multiplexer
        self._method = method
        self._asked = asked
        self._timeout = timeout
        self._inbox = Inbox(multiplexer.budget)
        self._stream_id = 0

    async def __aenter__(self) -> Self:
        self._scope = anyio.CancelScope(deadline=_deadline(self._timeout))
        self._scope.__enter__()
        try:
            self._stream_id = await self._multiplexer.open(self._asked, self)
        except BaseException as error:
            if self._scope.__exit__(type(error), error, error.__traceback__):
                raise self._too_late() from None
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> bool | None:
        self._multiplexer.forget(self._stream_id)
        self._inbox.clear()
        swallowed = self._scope.__exit__(kind, error, where)
        if self._scope.cancelled_caught:
            raise self._too_late() from None
        return swallowed

    async def send(self, message: Message) -> None:
        """Send a message; waits while the server does not read.

        Args:
            message: a message of the method's request type.

        Raises:
            LocalProtocolError: the client does not stream here, or has finished.
            StreamClosed: the server has ended the stream; :meth:`receive` says how.
            MessageTooLarge: nothing was sent, and the stream can still be used.
            ConnectionClosed: the connection was lost.
        """
        if not isinstance(message, self._method.request):
            raise LocalProtocolError(
                f"send on {self._asked}",
                found=f"{type(message).__name__}, not {self._method.request.__name__}",
            )
        await self._multiplexer.send(self._stream_id, message.SerializeToString())

    async def finish(self) -> None:
        """End our side of the stream; the server's messages can still be received.

        Raises:
            LocalProtocolError: the client does not stream here, or has finished.
            StreamClosed: the server has ended the stream; :meth:`receive` says how.
            ConnectionClosed: the connection was lost.
        """
        await self._multiplexer.finish(self._stream_id)

    async def receive(self) -> Any:
        """Receive the server's next message, or the answer if the method does not stream it.

        Raises:
            anyio.EndOfStream: the stream has ended, and the call succeeded.
            RemoteError: the stream has ended, and the call failed.
            DeadlineExceeded: the server exceeded the time limit of the call.
            ConnectionClosed: the connection was lost.
            Overloaded: messages were not received fast enough, and the stream was abandoned.
        """
        return decode(self._method.response, await self._inbox.get(), self._asked)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def take(self, answer: Answer) -> None:
        """Take a message from the server on this stream. For the multiplexer."""
        inbox = self._inbox
        if isinstance(answer, StreamFailed):
            inbox.end(answer.error)
        elif isinstance(answer, ResponseReceived):
            try:
                check_status(answer, self._asked, self._timeout)
            except TtrpcError as error:
                inbox.end(error)
                return
            # If the server streams, an empty response ends the stream. Otherwise it is the whole
            # answer.
            if answer.payload or not self._method.server_streaming:
                inbox.put(answer.payload)
            inbox.end()
        else:
            if answer.payload is not None:
                inbox.put(answer.payload)
            if answer.end:
                inbox.end()
            if inbox.full and not await inbox.room():
                self._multiplexer.give_up(answer.stream_id)
                inbox.end(
                    Overloaded(
                        str(self._asked), found=f"a stream that was not read for {PATIENCE:g} s"
                    )
                )

    def lost(self, error: ConnectionClosed) -> None:
        """Handle the loss of the connection. For the multiplexer."""
        self._inbox.end(error)

    def _too_late(self) -> TtrpcError:
        return DeadlineExceeded(str(self._asked), found=f"not done in {self._timeout:g} s")


class _Connected:
    """The result of :func:`connect`."""

    def __init__(self, path: str, timeout: float) -> None:
        self._path = path
        self._timeout = timeout

    async def __aenter__(self) -> Client:
        sock = await dial(self._path, timeout=self._timeout)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._client = Client(sock, self._tasks)
        return self._client

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> bool | None:
        self._client.close()
        if kind is not None and issubclass(kind, anyio.get_cancelled_exc_class()):
            return await self._tasks.__aexit__(kind, error, where)
        # The group has one task, which raises nothing. So raise an exception in the block
        # unchanged, not in an ExceptionGroup, which nobody expects from a connection.
        await self._tasks.__aexit__(None, None, None)
        return False


def connect(path: str, *, timeout: float = _CONNECT) -> _Connected:
    """Return a client connected to a unix socket, for an ``async with``.

    Args:
        path: the path of the socket, with or without ``unix://`` before it.
        timeout: seconds to wait while the server's backlog is full.

    Returns:
        An asynchronous context manager that returns a :class:`Client` and closes it at the end.
        Entering it raises :class:`~api.ttrpc.errors.ConnectFailed` if no server listens there.
    """
    return _Connected(path, timeout)


def _deadline(timeout: float | None) -> float:
    return math.inf if timeout is None else anyio.current_time() + timeout
