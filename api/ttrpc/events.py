"""The events that ``receive_data`` returns.

They are named tuples: a dataclass costs six times as much to define, and a server's start takes
only milliseconds. Distinguish them by class; never compare two kinds.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from google.protobuf.any_pb2 import Any

from api.ttrpc.errors import TtrpcError
from api.ttrpc.streams import State


class RequestReceived(NamedTuple):
    """A client has opened a stream (server).

    ``timeout_nano`` is in nanoseconds, 0 for none. ``metadata`` is in the order on the wire, and
    keys may repeat. ``state`` distinguishes a unary request from one with a stream.
    """

    stream_id: int
    service: str
    method: str
    payload: bytes
    timeout_nano: int
    metadata: tuple[tuple[str, str], ...]
    state: State


class DataReceived(NamedTuple):
    """One message on an open stream (both sides); ``payload`` is None for a bare end.

    ``end``: the peer has ended its side of the stream.
    """

    stream_id: int
    payload: bytes | None
    end: bool


class ResponseReceived(NamedTuple):
    """The server's final word on a stream (client); ``code`` 0 is success."""

    stream_id: int
    payload: bytes
    code: int
    message: str
    details: tuple[Any, ...]


class StreamFailed(NamedTuple):
    """A stream has ended, or was never opened, because the peer broke a rule or sent too much.

    The connection stays open. Send ``reply`` unchanged; it is empty on the client's side, where
    only the caller needs to know.
    """

    stream_id: int
    error: TtrpcError
    reply: bytes


class FrameIgnored(NamedTuple):
    """A frame without an effect: late, or of a type that a later protocol may define."""

    stream_id: int
    type: int
    why: str


class Ended(NamedTuple):
    """The connection has ended, always the last event; ``error`` is None for an orderly end."""

    error: TtrpcError | None


Event: TypeAlias = (
    "RequestReceived | DataReceived | ResponseReceived | StreamFailed | FrameIgnored | Ended"
)
