"""A ttrpc client on a unix socket.

One task reads the connection; any number of tasks call at once. When the connection is lost
every call under way fails at once with :class:`~api.ttrpc.errors.ConnectionClosed`. A client does
not reconnect by itself: only its owner knows which requests may be sent twice.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, TypeVar

import anyio

from api.ttrpc import sockets
from api.ttrpc.calls import (
    CLOSED_HERE,
    check_status,
    connection_closed,
    decode,
    nanoseconds,
    no_answer,
    why_ended,
)
from api.ttrpc.connection import ClientConnection
from api.ttrpc.errors import ConnectionClosed, TtrpcError
from api.ttrpc.events import Ended, ResponseReceived, StreamFailed
from api.ttrpc.transport import Transport

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable
    from types import TracebackType

    from anyio.abc import TaskGroup
    from google.protobuf.message import Message

    R = TypeVar("R", bound=Message)

_CONNECT: Final = 5.0  # seconds
_PAUSE: Final = 0.01  # seconds, between looks at a full backlog


async def dial(path: str, *, timeout: float = _CONNECT) -> socket.socket:
    """A connected socket, for a :class:`Client` in a task group of one's own.

    Args:
        path: of a unix socket, with or without ``unix://`` before it.
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


class _Pending:
    """A call that waits for its answer."""

    __slots__ = ("asked", "done", "outcome")

    outcome: ResponseReceived | TtrpcError

    def __init__(self, asked: str) -> None:
        self.asked = asked
        self.done = anyio.Event()

    def end(self, outcome: ResponseReceived | TtrpcError) -> None:
        """It has ended; the first time counts."""
        if not self.done.is_set():
            self.outcome = outcome
            self.done.set()


class Client:
    """The client's end of a connection.

    Args:
        sock: a connected stream socket, see :func:`dial`; the client closes it.
        tasks: where the connection is read, from now until it is closed or this group cancelled.
    """

    def __init__(self, sock: socket.socket, tasks: TaskGroup) -> None:
        self._closed = anyio.Event()
        self._connection = ClientConnection()
        self._transport = Transport(sock, tasks)
        self._calls: dict[int, _Pending] = {}
        self._why = ""
        self._reading = anyio.CancelScope()
        tasks.start_soon(self._read)

    @property
    def closed(self) -> bool:
        """Whether the connection has ended; then every call fails."""
        return self._closed.is_set()

    async def wait_closed(self) -> None:
        """Wait until the connection has ended, on either side."""
        await self._closed.wait()

    def close(self) -> None:
        """End the connection; calls under way fail with ``ConnectionClosed``."""
        self._close(CLOSED_HERE)

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
        """Call a method.

        A caller that is cancelled leaves the connection healthy: the server goes on (ttrpc has
        no message to stop it), and its answer is dropped when it comes.

        Args:
            service: full name, such as ``containerd.task.v2.Task``.
            method: name, such as ``State``.
            request: the request message.
            response_type: the response's class.
            timeout: seconds, for both sides; None for no limit.
            metadata: pairs of key and value; keys may repeat.

        Returns:
            The response.

        Raises:
            RemoteError: the server answered with a status other than OK.
            DeadlineExceeded: no answer within ``timeout``.
            ConnectionClosed: the connection was lost, or had been.
            MessageTooLarge: the request or the response is larger than 4 MiB.
            RemoteProtocolError: the answer was not what the protocol allows.
        """
        asked = f"{service}/{method}"
        answer: ResponseReceived | None = None
        deadline = math.inf if timeout is None else anyio.current_time() + timeout
        with anyio.CancelScope(deadline=deadline):
            answer = await self._exchange(
                asked,
                (service, method, request.SerializeToString()),
                nanoseconds(timeout),
                metadata,
            )
        if answer is None:
            raise no_answer(asked, timeout)
        check_status(answer, asked, timeout)
        return decode(response_type, answer.payload, asked)

    async def _exchange(
        self,
        asked: str,
        request: tuple[str, str, bytes],
        timeout_nano: int,
        metadata: Iterable[tuple[str, str]],
    ) -> ResponseReceived:
        if self.closed:
            raise connection_closed(asked, self._why)
        # A write that fails ends its own call only: the answers of others may have arrived
        # already. It is for the reader, which finds the end after them, to end the connection.
        try:
            await self._transport.room()
            # No await between taking an id and writing it: ids must grow on the wire.
            stream_id, frame = self._connection.send_request(
                *request, timeout_nano=timeout_nano, metadata=metadata
            )
            pending = self._calls[stream_id] = _Pending(asked)
            try:
                self._transport.write(frame)
                await pending.done.wait()
            finally:
                self._connection.abandon(stream_id)
                self._calls.pop(stream_id, None)
        except ConnectionClosed as error:
            raise connection_closed(asked, error.found) from None
        if isinstance(pending.outcome, ResponseReceived):
            return pending.outcome
        raise pending.outcome

    async def _read(self) -> None:
        why = CLOSED_HERE
        try:
            with self._reading:
                why = await self._hand_out()
        finally:
            self._close(why)

    async def _hand_out(self) -> str:
        """Give every answer to its call, until the end; says why it ended."""
        while True:
            for event in self._connection.receive_data(await self._transport.receive()):
                if isinstance(event, Ended):
                    return why_ended(event)
                if isinstance(event, (ResponseReceived, StreamFailed)):
                    pending = self._calls.get(event.stream_id)
                    if pending is not None:
                        pending.end(event.error if isinstance(event, StreamFailed) else event)

    def _close(self, why: str) -> None:
        """End the connection, and every call under way; an answer that came before counts."""
        if self.closed:
            return
        self._why = why
        self._closed.set()
        for pending in self._calls.values():
            pending.end(connection_closed(pending.asked, why))
        self._reading.cancel()
        self._transport.close()


class _Connected:
    """What :func:`connect` returns."""

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
        # The group has one task, which raises nothing: what the block raised is passed on as it
        # is, and not in an ExceptionGroup, which is unexpected from a connection.
        await self._tasks.__aexit__(None, None, None)
        return False


def connect(path: str, *, timeout: float = _CONNECT) -> _Connected:
    """A client connected to a unix socket, for an ``async with``.

    Args:
        path: of the socket, with or without ``unix://`` before it.
        timeout: seconds to wait while the server's backlog is full.

    Returns:
        An asynchronous context manager that gives a :class:`Client` and closes it at the end.
        Entering it raises :class:`~api.ttrpc.errors.ConnectFailed` if no server listens there.
    """
    return _Connected(path, timeout)
