"""The calls on a connection, without sockets: the rules of both servers and both clients.

:mod:`api.ttrpc.server` and :mod:`api.ttrpc.client` drive this on anyio, and the shim on its own
loop. They read, write, run handlers in tasks, and cancel them.

Rules of a server
- Every request runs in its own task, so a slow one does not delay others. Immediate handlers, which
  cannot be slow, answer in order while their requests are read.
- When a client disconnects, its handlers are cancelled, except those of ``shielded`` methods, which
  complete.
- An exception in a handler is an answer; it never ends the connection.
- Equal requests of a shared method are one call, and are answered together.
- If ``max_calls`` requests, or :data:`MAX_BYTES` of them, are in progress, more are refused.
  Requests of a service's ``unlimited`` methods are never refused, and do not count: a client that
  has abandoned thousands of Waits must still be able to call Kill.
- If a client does not read its answers, nothing more is read from it, and its requests wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from api.errors import NvshimError, Status, describe_bug
from api.ttrpc.connection import ServerConnection
from api.ttrpc.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    HandlerFailed,
    MessageTooLarge,
    Overloaded,
    RemoteError,
    RemoteProtocolError,
    ShuttingDown,
    TtrpcError,
    UndecodableMessage,
    Unimplemented,
)
from api.ttrpc.events import Ended, RequestReceived, ResponseReceived, StreamFailed
from api.ttrpc.service import Context, Credentials, Handler, ImmediateHandler, Method, Service
from api.ttrpc.streams import State

Log = Callable[[str, Mapping[str, object]], None]
# A response, an error, or the end of a stream without another message.
Outcome = bytes | NvshimError | None
# Service, method and message of equal requests.
Same = tuple[str, str, bytes]

M = TypeVar("M", bound=Message)

MAX_CALLS: Final = 1024
"""The most simultaneous requests of one connection, far more than an honest peer needs."""

MAX_BYTES: Final = 16 << 20
"""The most bytes of requests, and of messages that wait in streams."""

TURN: Final = 64
"""After this many answers to one shared call, other tasks get a turn."""

CLOSED_HERE: Final = "it was closed on this side"

_NANOSECONDS: Final = 10**9
_LONGEST: Final = 9e9  # seconds, 285 years: about the range of an int64 of nanoseconds


class ByteBudget:
    """Counts the bytes of its peer's requests and messages that a connection holds.

    Args:
        limit: the limit in bytes; above it, new requests should wait.
    """

    __slots__ = ("_held", "_limit")

    def __init__(self, limit: int = MAX_BYTES) -> None:
        self._limit = limit
        self._held = 0

    @property
    def full(self) -> bool:
        """Whether it holds more bytes than the limit."""
        return self._held > self._limit

    def take(self, size: int) -> None:
        """Count bytes that are now held."""
        self._held += size

    def release(self, size: int) -> None:
        """Count bytes that are no longer held."""
        self._held -= size


class Call:
    """A request with its own task.

    Attributes:
        stream_id: the id of its stream.
        service, method, handler: the called handler, and its names.
        context: the context for the handler.
        payload: the request, encoded; empty once it is decoded.
        size: the size of the request in bytes; stream messages are counted where they wait.
        counts: whether it counts against the limit of calls.
        shared: the request, if equal requests should get its answer.
        others: the streams of these equal requests.
        scope: used by the server, to cancel the task.
        inbox: used by the server, for the messages of a stream.
    """

    __slots__ = (
        "context",
        "counts",
        "handler",
        "inbox",
        "method",
        "others",
        "payload",
        "scope",
        "service",
        "shared",
        "size",
        "stream_id",
    )

    def __init__(
        self,
        event: RequestReceived,
        service: Service,
        known: tuple[Method, Handler],
        context: Context,
        *,
        counts: bool,
    ) -> None:
        self.stream_id = event.stream_id
        self.service = service
        self.method, self.handler = known
        self.context = context
        self.payload = event.payload
        self.size = 0 if self.method.streaming else len(event.payload)
        self.counts = counts
        self.shared: Same | None = None
        self.others: list[int] | None = None
        self.scope: Any = None
        self.inbox: Any = None


class Calls:
    """The requests of one connection that a server has accepted.

    Args:
        services: the services by name.
        peer: the client's process.
        log: called with an event and its fields for errors that no client sees.
        now: the loop's clock, in seconds.
        max_calls: the most requests in progress.
        budget: the limit of held bytes of requests.
        streams: whether to serve methods that stream.

    Attributes:
        connection: the protocol.
        draining: whether new requests are refused.
        by_stream: the calls in progress, by stream.
    """

    __slots__ = (
        "_budget",
        "_counted",
        "_log",
        "_max_calls",
        "_now",
        "_peer",
        "_services",
        "_shared",
        "_streams",
        "by_stream",
        "connection",
        "draining",
    )

    def __init__(
        self,
        services: Mapping[str, Service],
        peer: Credentials,
        log: Log,
        *,
        now: Callable[[], float],
        max_calls: int = MAX_CALLS,
        budget: ByteBudget | None = None,
        streams: bool = False,
    ) -> None:
        self._services = services
        self._peer = peer
        self._log = log
        self._now = now
        self._max_calls = max_calls
        self._budget = budget or ByteBudget()
        self._streams = streams
        self._counted = 0
        self._shared: dict[Same, Call] = {}
        self.connection = ServerConnection()
        self.draining = False
        self.by_stream: dict[int, Call] = {}

    def accept(self, event: RequestReceived, *, crowded: bool) -> bytes | Call:
        """Answer a request, join it to an equal one, start it, or refuse it.

        Args:
            event: the request.
            crowded: whether the client does not read, so that answers would be kept. Then even
                immediate handlers get a task, and wait there.

        Returns:
            The bytes to write, which may be empty; or the call to run in a task.
        """
        if not self.connection.is_live(event.stream_id):
            return b""  # already broken, and answered, by another frame of the same read
        service = self._services.get(event.service)
        if service is not None and not crowded:
            known = service.immediate.get(event.method)
            if known is not None:
                return self._answer_at_once(event, service, *known)
        if self._shared and not self.draining and not event.timeout_nano:
            call = self._shared.get((event.service, event.method, event.payload))
            if call is not None:
                if call.others is None:
                    call.others = []
                call.others.append(event.stream_id)
                return b""
        try:
            return self._start(event, service)
        except NvshimError as error:
            return self.answer(event.stream_id, error)

    async def handle(self, call: Call, stream: object = None) -> Outcome:
        """Call the handler of a request.

        Args:
            call: the request.
            stream: replaces the request for a method that streams.

        Returns:
            The answer. An exception is also an answer, except for a cancellation.
        """
        request = stream
        try:
            if request is None:
                request = decode(call.method.request, call.payload, call.context)
                call.payload = b""
            response = await call.service.call(call.handler, call.context, request)
            if call.method.server_streaming and response is None:
                return None
            return encode(response, call.method, call.context)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is its answer
            return self._failure(error, call.service, call.context, request)

    def escaped(self, call: Call) -> Outcome:
        """Return the outcome of a handler from which a foreign cancellation has escaped."""
        error = RuntimeError("something it waited for was cancelled")
        return self._failure(error, call.service, call.context, None)

    def too_late(self, call: Call) -> Outcome:
        """Return the outcome of a call after its time limit."""
        found = f"no answer in the client's {call.context.timeout:g} s"
        return DeadlineExceeded(str(call.context), found=found)

    def unshare(self, call: Call) -> None:
        """Join no more requests to a call, since they may get another answer."""
        if call.shared is not None and self._shared.get(call.shared) is call:
            del self._shared[call.shared]

    def ended(self, call: Call) -> None:
        """Handle that the task of a call has ended."""
        self.unshare(call)
        del self.by_stream[call.stream_id]
        self._counted -= call.counts
        self._budget.release(call.size)

    def broken(self, event: StreamFailed) -> Call | None:
        """Return the call to cancel after its client has broken its stream, already answered."""
        call = self.by_stream.get(event.stream_id)
        return call if call is not None and call.shared is None else None

    def answer(self, stream_id: int, outcome: Outcome) -> bytes:
        """Return the frame that ends a stream; empty if the stream has ended already."""
        connection = self.connection
        if not connection.is_live(stream_id):
            return b""
        if outcome is None:
            return connection.send_end(stream_id)
        if not isinstance(outcome, NvshimError):
            try:
                return connection.send_response(stream_id, outcome)
            except MessageTooLarge as error:
                outcome = error
        if isinstance(outcome, RemoteError):  # another server's: pass it on unchanged
            return connection.send_error(
                stream_id, outcome.status, outcome.message, outcome.details
            )
        return connection.send_error(stream_id, outcome.status, str(outcome))

    def _answer_at_once(
        self, event: RequestReceived, service: Service, method: Method, handler: ImmediateHandler
    ) -> bytes:
        context = self._context(event)
        request: object = None
        outcome: Outcome
        try:
            request = decode(method.request, event.payload, context)
            outcome = encode(service.call(handler, context, request), method, context)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is its answer
            outcome = self._failure(error, service, context, request)
        return self.answer(event.stream_id, outcome)

    def _context(self, event: RequestReceived) -> Context:
        timeout = event.timeout_nano / _NANOSECONDS if event.timeout_nano else None
        return Context(
            event.service,
            event.method,
            event.metadata,
            timeout=timeout,
            deadline=math.inf if timeout is None else self._now() + timeout,
            peer=self._peer,
        )

    def _start(self, event: RequestReceived, service: Service | None) -> Call:
        """Register a request, or raise the reason to refuse it."""
        asked = f"{event.service}/{event.method}"
        if self.draining:
            raise ShuttingDown(asked, found="a server that is shutting down")
        if service is None:
            raise Unimplemented(asked, found=f"service {event.service} is not implemented")
        known = service.methods.get(event.method)
        if known is None or (known[0].streaming and not self._streams):
            raise Unimplemented(asked, found=f"method {event.method} is not implemented")
        counts = event.method not in service.unlimited
        if counts:
            self._refuse_beyond_limit(asked)
        if known[0].server_streaming and event.state is State.UNARY:
            raise RemoteProtocolError(
                asked, found="a unary call of a method that streams its answer"
            )
        call = Call(event, service, known, self._context(event), counts=counts)
        if event.method in service.shared and not event.timeout_nano:
            call.shared = (event.service, event.method, event.payload)
            self._shared[call.shared] = call
        self.by_stream[call.stream_id] = call
        self._counted += counts
        self._budget.take(call.size)
        return call

    def _refuse_beyond_limit(self, asked: str) -> None:
        found = ""
        if self._counted >= self._max_calls:
            found = f"{self._max_calls} requests under way on this connection"
        elif self._budget.full:
            found = "too many bytes of this client's requests under way"
        if found:
            raise Overloaded(asked, found=found, do="wait for an answer first")

    def _failure(
        self, raised: Exception, service: Service, context: Context, request: object
    ) -> NvshimError:
        """Convert a handler's exception to an error that can be sent; log unexpected ones."""
        error: BaseException = raised
        # A handler's own task group wraps even a single, well-typed failure.
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if service.translate is not None and not isinstance(error, NvshimError):
            error = service.translate(error, context, request) or error
        if isinstance(error, NvshimError) and not isinstance(error, HandlerFailed):
            return error
        if not isinstance(error, HandlerFailed):
            error = HandlerFailed(str(context), found=f"{type(error).__name__}: {error}")
        traceback = describe_bug(raised)
        self._log(
            "a handler failed",
            {"method": str(context), "error": str(error), "traceback": traceback},
        )
        return error


def decode(type_: type[M], payload: bytes, asked: object) -> M:
    """Decode the message in a payload.

    Raises:
        UndecodableMessage: it contains none.
    """
    try:
        return type_.FromString(payload)
    except DecodeError:
        raise UndecodableMessage(
            f"{type_.DESCRIPTOR.full_name} of {asked}",
            found=f"{len(payload)} bytes that are none",
        ) from None


def encode(response: Message | None, method: Method, asked: object) -> bytes:
    """Encode a handler's result as a payload.

    Raises:
        HandlerFailed: the result is not of the method's response type.
    """
    if not isinstance(response, method.response):
        raise HandlerFailed(
            str(asked), found=f"{type(response).__name__}, not {method.response.__name__}"
        )
    return response.SerializeToString()


def check_status(response: ResponseReceived, asked: object, timeout: float | None) -> None:
    """Raise the error in a response's status, if any.

    Raises:
        RemoteError: the status is not OK.
        DeadlineExceeded: the server exceeded the time limit of the call.
    """
    if response.code == Status.OK:
        return
    error = RemoteError(
        str(asked), status=response.code, message=response.message, details=response.details
    )
    if response.code == Status.DEADLINE_EXCEEDED and timeout is not None:
        raise no_answer(asked, timeout) from error
    raise error


def no_answer(asked: object, timeout: float | None) -> TtrpcError:
    """Return the error of a call that was not answered in time."""
    return DeadlineExceeded(str(asked), found=f"no answer in {timeout:g} s")


def connection_closed(asked: object, why: str) -> ConnectionClosed:
    """Return the error of a call whose connection was lost."""
    found = f"the connection has ended: {why}"
    return ConnectionClosed(str(asked), found=found, do="connect again")


def why_ended(event: Ended) -> str:
    """Return why a client's connection has ended."""
    return str(event.error) if event.error else "the server closed it"


def nanoseconds(timeout: float | None) -> int:
    """Convert a timeout from seconds to the form on the wire, where 0 means none."""
    if timeout is None:
        return 0
    return max(1, int(min(timeout, _LONGEST) * _NANOSECONDS))
