"""The protocol without sockets: bytes in, events out; calls in, bytes out.

Pass received bytes to :meth:`receive_data` and act on the events. Call ``send_*`` and write the
returned bytes, in the order of the calls. Nothing here blocks, and only live streams take memory.

How a server handles a frame that it must not accept:

==========================================  =============================================
even stream id                              the stream is answered INVALID_ARGUMENT
request with an id used before              the same, and a live stream of that id ends
request both "remote open" and "… closed"   the same
request that is no ``ttrpc.Request``        the same
data before a request                       the same
data on a unary stream, or after the end    the same; the stream ends
"no data" with data                         the same; the stream ends
more than 4 MiB                             RESOURCE_EXHAUSTED; the stream ends
data after the stream's end                 ignored: the peer could not know yet
response, unknown type                      ignored
==========================================  =============================================

A client treats its frames in the same way, for each call, with one exception: an answer on a stream
that it did not open, or a request, ends the connection, since no later answer could be trusted.

:mod:`api.ttrpc.session`, not this module, limits the requests in progress.

Source: ttrpc PROTOCOL.md. The checks have the Go server's order, for the same results.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError

from api.errors import Status, one_line
from api.proto import ttrpc_pb2
from api.ttrpc import streams
from api.ttrpc.errors import (
    ConnectionClosed,
    LocalProtocolError,
    MessageTooLarge,
    RemoteProtocolError,
    StreamClosed,
    TtrpcError,
    UndecodableMessage,
)
from api.ttrpc.events import (
    DataReceived,
    Ended,
    Event,
    FrameIgnored,
    RequestReceived,
    ResponseReceived,
    StreamFailed,
)
from api.ttrpc.frames import (
    DATA,
    DATA_MAX,
    NO_DATA,
    REMOTE_CLOSED,
    REMOTE_OPEN,
    REQUEST,
    RESPONSE,
    Frame,
    FrameReader,
    Oversized,
    encode,
)
from api.ttrpc.streams import TRANSITIONS, State

_LAST_ID: Final = 2**32 - 1

_REQUEST_STATES: Final = {
    0: streams.Event.REQUEST,
    REMOTE_CLOSED: streams.Event.REQUEST_CLOSED,
    REMOTE_OPEN: streams.Event.REQUEST_OPEN,
}


class _Connection:
    """The common part of both roles: the frame reader and the table of live streams."""

    __slots__ = ("_ended", "_last_id", "_reader", "_streams")

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._streams: dict[int, State] = {}
        self._last_id = 0
        self._ended = False

    @property
    def live(self) -> int:
        """The number of live streams."""
        return len(self._streams)

    def is_live(self, stream_id: int) -> bool:
        """Whether a stream has not ended, so that either side may still send."""
        return stream_id in self._streams

    def abandon(self, stream_id: int) -> None:
        """Forget a stream; late frames for it are ignored. No effect if it has ended."""
        self._streams.pop(stream_id, None)

    def receive_data(self, data: bytes) -> list[Event]:
        """Process bytes from the peer.

        Args:
            data: the result of a read, split anywhere; ``b""`` for the end of the connection.

        Returns:
            The events, in order; an :class:`Ended` is always the last.

        Raises:
            LocalProtocolError: this was called after :class:`Ended`.
        """
        if self._ended:
            raise LocalProtocolError("receive data", found="a connection that has ended")
        if not data:
            return [self._end_of_data()]
        events: list[Event] = []
        for frame in self._reader.feed(data):
            event = self._judge(frame)
            events.append(event)
            if isinstance(event, Ended):
                self._ended = True
                break
        return events

    def _end_of_data(self) -> Ended:
        self._ended = True
        if self._reader.mid_frame:
            return Ended(RemoteProtocolError("the next frame", found="the connection's end in it"))
        return Ended(None)

    def _judge(self, frame: Frame | Oversized) -> Event:
        raise NotImplementedError

    def _fail(self, stream_id: int, error: TtrpcError) -> StreamFailed:
        raise NotImplementedError

    def _receive(
        self, frame: Frame | Oversized, data: streams.Event, end: streams.Event
    ) -> DataReceived | StreamFailed:
        """Return a data frame on a live stream."""
        stream_id = frame.stream_id
        if isinstance(frame, Oversized):
            return self._fail(stream_id, _oversized(frame))
        payload = frame.data
        closing = frame.flags & REMOTE_CLOSED
        following = TRANSITIONS.get((self._streams[stream_id], end if closing else data))
        if following is None:
            state = self._streams[stream_id].name
            return self._fail(
                stream_id, _broken(stream_id, f"data on a stream that is {state}, without a place")
            )
        if frame.flags & NO_DATA:
            if payload:
                return self._fail(stream_id, _broken(stream_id, 'data flagged "no data"'))
            self._move(stream_id, following)
            return DataReceived(stream_id, None, bool(closing))
        self._move(stream_id, following)
        return DataReceived(stream_id, payload, bool(closing))

    def _move(self, stream_id: int, following: State) -> None:
        if following is State.ENDED:
            del self._streams[stream_id]
        else:
            self._streams[stream_id] = following

    def _send(self, stream_id: int, event: streams.Event, frame: bytes) -> bytes:
        """Return the frame, if the stream's state allows it now."""
        state = self._streams.get(stream_id)
        if state is None:
            raise StreamClosed(f"send on stream {stream_id}", found="it is not open")
        following = TRANSITIONS.get((state, event))
        if following is None:
            raise LocalProtocolError(
                f"send {event.name} on stream {stream_id}", found=f"it is {state.name}"
            )
        self._move(stream_id, following)
        return frame


class ServerConnection(_Connection):
    """The side that accepted."""

    __slots__ = ()

    def send_response(self, stream_id: int, payload: bytes) -> bytes:
        """Answer a stream with success, which ends it.

        Args:
            stream_id: the id of a live stream.
            payload: the response message, encoded.

        Returns:
            What to write.

        Raises:
            MessageTooLarge: the stream is still open; answer with :meth:`send_error` instead.
            StreamClosed: the stream has ended.
        """
        response = ttrpc_pb2.Response(payload=payload)
        frame = encode(stream_id, RESPONSE, 0, response.SerializeToString())
        return self._send(stream_id, streams.Event.RESPONSE, frame)

    def send_error(
        self, stream_id: int, code: int, message: str, details: Iterable[Any] = ()
    ) -> bytes:
        """Answer a stream with a status, which ends it.

        Args:
            stream_id: the id of a live stream.
            code: one of :class:`api.errors.Status`, not OK.
            message: one line.
            details: sent if the message has room for them.

        Returns:
            What to write.

        Raises:
            StreamClosed: the stream has ended.
        """
        frame = _error_frame(stream_id, code, message, details)
        return self._send(stream_id, streams.Event.RESPONSE, frame)

    def send_data(self, stream_id: int, payload: bytes) -> bytes:
        """Send one message of a stream.

        Args:
            stream_id: the id of a live stream that is not unary.
            payload: the message, encoded.

        Returns:
            What to write.

        Raises:
            MessageTooLarge: nothing was sent, and the stream is still open.
            LocalProtocolError: the stream is unary.
            StreamClosed: the stream has ended.
        """
        frame = encode(stream_id, DATA, 0, payload)
        return self._send(stream_id, streams.Event.SERVER_DATA, frame)

    def send_end(self, stream_id: int) -> bytes:
        """End a stream with success and without a further message.

        Args:
            stream_id: the id of a live stream that is not unary.

        Returns:
            What to write.

        Raises:
            LocalProtocolError: the stream is unary.
            StreamClosed: the stream has ended.
        """
        frame = encode(stream_id, DATA, REMOTE_CLOSED | NO_DATA)
        return self._send(stream_id, streams.Event.SERVER_END, frame)

    def _judge(self, frame: Frame | Oversized) -> Event:
        stream_id = frame.stream_id
        if frame.type not in (REQUEST, DATA):
            return FrameIgnored(stream_id, frame.type, "servers take requests and data only")
        if stream_id % 2 == 0:
            return self._fail(stream_id, _broken(stream_id, "an even id; a client's are odd"))
        if frame.type == REQUEST:
            return self._open(frame)
        if stream_id in self._streams:
            return self._receive(frame, streams.Event.CLIENT_DATA, streams.Event.CLIENT_END)
        if stream_id <= self._last_id:
            return FrameIgnored(stream_id, DATA, "the stream has ended")
        return self._fail(stream_id, _broken(stream_id, "data before a request"))

    def _open(self, frame: Frame | Oversized) -> RequestReceived | StreamFailed:
        stream_id = frame.stream_id
        if stream_id <= self._last_id:
            return self._fail(stream_id, _broken(stream_id, "an id used before; ids must grow"))
        self._last_id = stream_id
        if isinstance(frame, Oversized):
            return self._fail(stream_id, _oversized(frame))
        event = _REQUEST_STATES.get(frame.flags & (REMOTE_OPEN | REMOTE_CLOSED))
        if event is None:
            return self._fail(stream_id, _broken(stream_id, "a request both open and closed"))
        try:
            request = ttrpc_pb2.Request.FromString(frame.data)
        except DecodeError:
            return self._fail(stream_id, _undecodable(stream_id, "ttrpc.Request"))
        state = TRANSITIONS[State.IDLE, event]
        self._streams[stream_id] = state
        metadata = request.metadata
        return RequestReceived(
            stream_id,
            request.service,
            request.method,
            request.payload,
            request.timeout_nano,
            tuple([(pair.key, pair.value) for pair in metadata]) if metadata else (),
            state,
        )

    def _fail(self, stream_id: int, error: TtrpcError) -> StreamFailed:
        self.abandon(stream_id)
        return StreamFailed(stream_id, error, _error_frame(stream_id, error.status, str(error), ()))


class ClientConnection(_Connection):
    """The side that connected."""

    __slots__ = ()

    def send_request(
        self,
        service: str,
        method: str,
        payload: bytes,
        *,
        timeout_nano: int = 0,
        metadata: Iterable[tuple[str, str]] = (),
        state: State = State.UNARY,
    ) -> tuple[int, bytes]:
        """Open a stream.

        Args:
            service: the full name of the service.
            method: the name of the method.
            payload: the encoded request message; empty if all messages come as data.
            timeout_nano: the time limit for the answer in nanoseconds; 0 for no limit.
            metadata: pairs of key and value; keys may repeat.
            state: ``UNARY``, ``OPEN`` (we will send data) or ``CLIENT_CLOSED`` (only the server
                will).

        Returns:
            The stream's id and what to write. Write them in the order of the calls, since ids must
            grow on the wire.

        Raises:
            MessageTooLarge: no stream was opened.
            ConnectionClosed: all ids of this connection have been used.
            LocalProtocolError: a stream cannot start in that state.
        """
        flags = _REQUEST_FLAGS.get(state)
        if flags is None:
            raise LocalProtocolError("open a stream", found=f"{state.name}, in which none starts")
        request = ttrpc_pb2.Request(
            service=service, method=method, payload=payload, timeout_nano=timeout_nano
        )
        for key, value in metadata:
            request.metadata.add(key=key, value=value)
        stream_id = self._last_id + 2 if self._last_id else 1
        if stream_id > _LAST_ID:
            raise ConnectionClosed(
                f"{service}/{method}", found="no stream ids left", do="connect again"
            )
        frame = encode(stream_id, REQUEST, flags, request.SerializeToString())
        self._last_id = stream_id
        self._streams[stream_id] = state
        return stream_id, frame

    def send_data(self, stream_id: int, payload: bytes) -> bytes:
        """Send one message of a stream.

        Args:
            stream_id: the id of a stream that was opened in state ``OPEN``.
            payload: the message, encoded.

        Returns:
            What to write.

        Raises:
            MessageTooLarge: nothing was sent, and the stream is still open.
            LocalProtocolError: we have ended our side, or the stream is unary.
            StreamClosed: the stream has ended.
        """
        frame = encode(stream_id, DATA, 0, payload)
        return self._send(stream_id, streams.Event.CLIENT_DATA, frame)

    def send_end(self, stream_id: int) -> bytes:
        """End our side of a stream without a message, as the Go server requires.

        Args:
            stream_id: the id of a stream that was opened in state ``OPEN``.

        Returns:
            What to write.

        Raises:
            LocalProtocolError: we have ended our side, or the stream is unary.
            StreamClosed: the stream has ended.
        """
        frame = encode(stream_id, DATA, REMOTE_CLOSED | NO_DATA)
        return self._send(stream_id, streams.Event.CLIENT_END, frame)

    def may_send(self, stream_id: int) -> bool:
        """Whether we may send data on a stream."""
        return self._streams.get(stream_id) is State.OPEN

    def _judge(self, frame: Frame | Oversized) -> Event:
        stream_id = frame.stream_id
        if frame.type == REQUEST:
            return Ended(RemoteProtocolError(f"stream {stream_id}", found="a server's request"))
        if frame.type not in (RESPONSE, DATA):
            return FrameIgnored(stream_id, frame.type, "a type of a later protocol")
        if stream_id in self._streams:
            if frame.type == DATA:
                return self._receive(frame, streams.Event.SERVER_DATA, streams.Event.SERVER_END)
            return self._close(frame)
        if stream_id % 2 and stream_id <= self._last_id:
            return FrameIgnored(stream_id, frame.type, "the stream has ended")
        return Ended(
            RemoteProtocolError(f"stream {stream_id}", found="an answer to what was never asked")
        )

    def _close(self, frame: Frame | Oversized) -> ResponseReceived | StreamFailed:
        stream_id = frame.stream_id
        if isinstance(frame, Oversized):
            return self._fail(stream_id, _oversized(frame))
        try:
            response = ttrpc_pb2.Response.FromString(frame.data)
        except DecodeError:
            return self._fail(stream_id, _undecodable(stream_id, "ttrpc.Response"))
        self._move(stream_id, TRANSITIONS[self._streams[stream_id], streams.Event.RESPONSE])
        if not response.HasField("status"):
            return ResponseReceived(stream_id, response.payload, Status.OK, "", ())
        status = response.status
        return ResponseReceived(
            stream_id, response.payload, status.code, status.message, tuple(status.details)
        )

    def _fail(self, stream_id: int, error: TtrpcError) -> StreamFailed:
        self.abandon(stream_id)
        return StreamFailed(stream_id, error, b"")


_REQUEST_FLAGS: Final = {
    State.UNARY: 0,
    State.OPEN: REMOTE_OPEN,
    State.CLIENT_CLOSED: REMOTE_CLOSED,
}


def _error_frame(stream_id: int, code: int, message: str, details: Iterable[Any]) -> bytes:
    status = ttrpc_pb2.Status(code=code, message=message, details=details)
    answer = ttrpc_pb2.Response(status=status).SerializeToString()
    if len(answer) > DATA_MAX:
        # Half an answer is better than none, since programs read the code.
        status = ttrpc_pb2.Status(code=code, message=one_line(message))
        answer = ttrpc_pb2.Response(status=status).SerializeToString()
    return encode(stream_id, RESPONSE, 0, answer)


def _broken(stream_id: int, found: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"stream {stream_id}", found=found)


def _undecodable(stream_id: int, name: str) -> RemoteProtocolError:
    return UndecodableMessage(f"{name} on stream {stream_id}", found="bytes that are none")


def _oversized(frame: Oversized) -> MessageTooLarge:
    return MessageTooLarge(
        f"stream {frame.stream_id}",
        found=f"a message of {frame.length} bytes; ttrpc allows {DATA_MAX}",
        do="send less in one message",
    )
