"""The protocol without sockets: bytes in, events out; calls in, bytes out. Unary calls alone.

Feed :meth:`receive_data` whatever arrived and act on the events; call ``send_*`` and write the
bytes they return, in the order of the calls. Nothing here blocks, and nothing is remembered
but the streams that are alive.

What a server does with a frame that it must not accept:

==========================================  =============================================
even stream id                              the stream is answered INVALID_ARGUMENT
request with an id used before              the same, and a live stream of that id ends
request both "remote open" and "… closed"   the same
request that is no ``ttrpc.Request``        the same
data before a request                       the same
data after a request                        the same; the stream ends
more than 4 MiB                             RESOURCE_EXHAUSTED; the stream ends
data after the stream's end                 ignored: the peer could not know yet
response, unknown type                      ignored
==========================================  =============================================

A client judges in the same way, one call at a time, but for what it never asked: an answer on
a stream that it did not open, or a request, ends the connection, since no later answer could
be trusted.

A stream is one request and one response here. The data by which the protocol has either side go on
streaming are nothing that containerd's services for shims send or take.

How many requests may be under way is not judged here: see :mod:`api.ttrpc.calls`.

Source: ttrpc PROTOCOL.md; the order of checks follows the Go server, so that one peer sees the
same of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError

from api.errors import Status, one_line
from api.proto import ttrpc_pb2
from api.ttrpc.errors import (
    ConnectionClosed,
    LocalProtocolError,
    MessageTooLarge,
    RemoteProtocolError,
    StreamClosed,
    UndecodableMessage,
)
from api.ttrpc.events import (
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
    REMOTE_CLOSED,
    REMOTE_OPEN,
    REQUEST,
    RESPONSE,
    FrameReader,
    Oversized,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.any_pb2 import Any

    from api.ttrpc.errors import TtrpcError
    from api.ttrpc.frames import Frame

_LAST_ID: Final = 2**32 - 1
_BOTH: Final = REMOTE_OPEN | REMOTE_CLOSED


class _Connection:
    """What both roles share: the frame reader and the table of live streams."""

    __slots__ = ("_ended", "_last_id", "_reader", "_streams")

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._streams: set[int] = set()
        self._last_id = 0
        self._ended = False

    @property
    def live(self) -> int:
        """How many streams are alive."""
        return len(self._streams)

    def is_live(self, stream_id: int) -> bool:
        """Whether a stream may still be sent on or heard from."""
        return stream_id in self._streams

    def abandon(self, stream_id: int) -> None:
        """Forget a stream; late frames for it are ignored. No effect if it has ended."""
        self._streams.discard(stream_id)

    def receive_data(self, data: bytes) -> list[Event]:
        """Take what the peer sent.

        Args:
            data: what one read returned, split anywhere; ``b""`` for the end of the connection.

        Returns:
            The events, in order. After :class:`Ended` there are no more.

        Raises:
            LocalProtocolError: fed again after :class:`Ended`.
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

    def _end(self, stream_id: int, frame: bytes) -> bytes:
        """The frame that ends a stream."""
        if stream_id not in self._streams:
            raise StreamClosed(f"answer stream {stream_id}", found="it is not open")
        self._streams.discard(stream_id)
        return frame


class ServerConnection(_Connection):
    """The side that accepted."""

    __slots__ = ()

    def send_response(self, stream_id: int, payload: bytes) -> bytes:
        """Answer a stream with success, which ends it.

        Args:
            stream_id: of a live stream.
            payload: the response message, encoded.

        Returns:
            What to write.

        Raises:
            MessageTooLarge: answer with :meth:`send_error` instead; the stream still lives.
            StreamClosed: the stream has ended.
        """
        response = ttrpc_pb2.Response(payload=payload)
        frame = encode(stream_id, RESPONSE, 0, response.SerializeToString())
        return self._end(stream_id, frame)

    def send_error(
        self, stream_id: int, code: int, message: str, details: Iterable[Any] = ()
    ) -> bytes:
        """Answer a stream with a status, which ends it.

        Args:
            stream_id: of a live stream.
            code: one of :class:`api.errors.Status`, not OK.
            message: one line.
            details: sent along if there is room in a message.

        Returns:
            What to write.

        Raises:
            StreamClosed: the stream has ended.
        """
        frame = _error_frame(stream_id, code, message, details)
        return self._end(stream_id, frame)

    def _judge(self, frame: Frame | Oversized) -> Event:
        stream_id = frame.stream_id
        if frame.type not in (REQUEST, DATA):
            return FrameIgnored(stream_id, frame.type, "servers take requests and data only")
        if stream_id % 2 == 0:
            return self._fail(stream_id, _broken(stream_id, "an even id; a client's are odd"))
        if frame.type == REQUEST:
            return self._open(frame)
        if stream_id in self._streams:
            return self._fail(stream_id, _unwanted(frame))
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
        if frame.flags & _BOTH == _BOTH:
            return self._fail(stream_id, _broken(stream_id, "a request both open and closed"))
        try:
            request = ttrpc_pb2.Request.FromString(frame.data)
        except DecodeError:
            return self._fail(stream_id, _undecodable(stream_id, "ttrpc.Request"))
        self._streams.add(stream_id)
        metadata = request.metadata
        return RequestReceived(
            stream_id,
            request.service,
            request.method,
            request.payload,
            request.timeout_nano,
            tuple([(pair.key, pair.value) for pair in metadata]) if metadata else (),
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
    ) -> tuple[int, bytes]:
        """Open a stream.

        Args:
            service: full name of the service.
            method: name of the method.
            payload: the request message, encoded.
            timeout_nano: nanoseconds until the answer is of no use, 0 for no limit.
            metadata: pairs of key and value; keys may repeat.

        Returns:
            The stream's id and what to write. Ids must reach the wire in the order of the calls.

        Raises:
            MessageTooLarge: nothing was opened.
            ConnectionClosed: the ids of this connection are used up.
        """
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
        frame = encode(stream_id, REQUEST, 0, request.SerializeToString())
        self._last_id = stream_id
        self._streams.add(stream_id)
        return stream_id, frame

    def _judge(self, frame: Frame | Oversized) -> Event:
        stream_id = frame.stream_id
        if frame.type == REQUEST:
            return Ended(RemoteProtocolError(f"stream {stream_id}", found="a server's request"))
        if frame.type not in (RESPONSE, DATA):
            return FrameIgnored(stream_id, frame.type, "a type of a later protocol")
        if stream_id in self._streams:
            if frame.type == DATA:
                return self._fail(stream_id, _unwanted(frame))
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
        self.abandon(stream_id)
        if not response.HasField("status"):
            return ResponseReceived(stream_id, response.payload, Status.OK, "", ())
        status = response.status
        return ResponseReceived(
            stream_id, response.payload, status.code, status.message, tuple(status.details)
        )

    def _fail(self, stream_id: int, error: TtrpcError) -> StreamFailed:
        self.abandon(stream_id)
        return StreamFailed(stream_id, error, b"")


def _error_frame(stream_id: int, code: int, message: str, details: Iterable[Any]) -> bytes:
    status = ttrpc_pb2.Status(code=code, message=message, details=details)
    answer = ttrpc_pb2.Response(status=status).SerializeToString()
    if len(answer) > DATA_MAX:
        # Better half an answer than none: the code is what programs read.
        status = ttrpc_pb2.Status(code=code, message=one_line(message))
        answer = ttrpc_pb2.Response(status=status).SerializeToString()
    return encode(stream_id, RESPONSE, 0, answer)


def _broken(stream_id: int, found: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"stream {stream_id}", found=found)


def _unwanted(frame: Frame | Oversized) -> TtrpcError:
    if isinstance(frame, Oversized):
        return _oversized(frame)
    return _broken(frame.stream_id, "data on a unary stream")


def _undecodable(stream_id: int, name: str) -> UndecodableMessage:
    return UndecodableMessage(f"{name} on stream {stream_id}", found="bytes that are none")


def _oversized(frame: Oversized) -> MessageTooLarge:
    return MessageTooLarge(
        f"stream {frame.stream_id}",
        found=f"a message of {frame.length} bytes; ttrpc allows {DATA_MAX}",
        do="send less in one message",
    )
