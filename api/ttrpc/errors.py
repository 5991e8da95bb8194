"""What can go wrong on the wire, by who is to blame and what can be done.

::

    TtrpcError                    E0001
    ├── LocalProtocolError        E0002  our own bug: a call that the protocol does not allow now
    ├── RemoteProtocolError       E0003  the peer broke the protocol
    │   └── UndecodableMessage    E0004  … with bytes that are not the message they should be
    ├── RemoteError               E0005  the peer answered with a status other than OK
    ├── ConnectFailed             E0006  no server answers at that address
    ├── ConnectionClosed          E0007  the connection is gone; connect again
    ├── StreamClosed              E0008  the peer has ended this stream; others go on
    ├── Unimplemented             E0009  no such service or method
    ├── DeadlineExceeded          E0010  no answer in time
    ├── MessageTooLarge           E0011  more than 4 MiB in one message
    ├── Overloaded                E0012  the peer asks for more at once than we hold for one peer
    ├── ShuttingDown              E0013  this server takes no new requests
    ├── PeerRejected              E0014  another user's process connected
    ├── HandlerFailed             E0015  a handler raised what is not an NvshimError
    └── TypeMismatch              E0016  an ``Any`` holds another type than expected

As in h11 a protocol error is *local* (our call is not allowed: fix the caller) or
*remote* (the peer did). The core types it where the peer's bytes enter and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.any_pb2 import Any

from api.errors import NvshimError, Status

__all__ = [
    "ConnectFailed",
    "ConnectionClosed",
    "DeadlineExceeded",
    "HandlerFailed",
    "LocalProtocolError",
    "MessageTooLarge",
    "Overloaded",
    "PeerRejected",
    "RemoteError",
    "RemoteProtocolError",
    "ShuttingDown",
    "StreamClosed",
    "TtrpcError",
    "TypeMismatch",
    "UndecodableMessage",
    "Unimplemented",
]


class TtrpcError(NvshimError):
    """Something about the wire: the branch that all of this module's errors hang on."""

    code = "NVSHIM-E0001"
    status = Status.UNKNOWN


class LocalProtocolError(TtrpcError):
    """Our call is not allowed by the protocol now. Raised by every ``send_*`` of the core."""

    code = "NVSHIM-E0002"
    status = Status.INTERNAL
    remedy = "report this: it is a fault of nvshim"


class RemoteProtocolError(TtrpcError):
    """The peer broke the protocol, on one stream or (if raised by the core) for all of them."""

    code = "NVSHIM-E0003"
    status = Status.INVALID_ARGUMENT
    remedy = "see which program is at the other end, and its log"


class UndecodableMessage(RemoteProtocolError):
    """The peer sent bytes that are not the protobuf message that belongs there."""

    code = "NVSHIM-E0004"
    status = Status.INVALID_ARGUMENT
    remedy = "check that both ends have compatible releases"


class RemoteError(TtrpcError):
    """The peer answered with a status other than OK. Raised by the client's calls.

    Args:
        asked: the call, ``service/method``.
        status: the peer's status code, one of :class:`api.errors.Status`; it stays this
            error's own ``status``, so a handler that lets it pass answers with the same code.
        message: the peer's message as it came. ``str()`` has it as one bounded line.
        details: the peer's details, each an ``Any``.
    """

    code = "NVSHIM-E0005"
    status = Status.UNKNOWN

    def __init__(
        self, asked: str, *, status: int, message: str, details: Iterable[Any] = ()
    ) -> None:
        super().__init__(asked, found=message or f"status {status} without a message")
        self.status = status  # the one error whose status is the peer's
        self.message = message
        self.details = tuple(details)


class ConnectFailed(TtrpcError):
    """No server answers at an address. Raised by :func:`api.ttrpc.client.connect`."""

    code = "NVSHIM-E0006"
    status = Status.UNAVAILABLE
    remedy = "check that the server runs and listens there"


class ConnectionClosed(TtrpcError):
    """The connection ended before the call did. Raised by calls; connect again to go on."""

    code = "NVSHIM-E0007"
    status = Status.UNAVAILABLE


class StreamClosed(TtrpcError):
    """The peer has ended the stream we want to send on; its answer can still be received."""

    code = "NVSHIM-E0008"
    status = Status.FAILED_PRECONDITION
    remedy = "read the answer that has come, and start the call again"


class Unimplemented(TtrpcError):
    """The server has no such service, or the service no handler for the method."""

    code = "NVSHIM-E0009"
    status = Status.UNIMPLEMENTED
    remedy = "use a release that has this call"


class DeadlineExceeded(TtrpcError):
    """A call took longer than its timeout, whichever side noticed first."""

    code = "NVSHIM-E0010"
    status = Status.DEADLINE_EXCEEDED
    remedy = "try again, and see the log of the program that did not answer"


class MessageTooLarge(TtrpcError):
    """A message is larger than the 4 MiB that the protocol allows, ours or the peer's."""

    code = "NVSHIM-E0011"
    status = Status.RESOURCE_EXHAUSTED
    remedy = "send less in one message"


class Overloaded(TtrpcError):
    """One connection holds more streams or bytes than we keep for one peer."""

    code = "NVSHIM-E0012"
    status = Status.RESOURCE_EXHAUSTED
    remedy = "wait for an answer first"


class ShuttingDown(TtrpcError):
    """A request came after the server had been told to stop."""

    code = "NVSHIM-E0013"
    status = Status.UNAVAILABLE
    remedy = "create it once more"


class PeerRejected(TtrpcError):
    """A process of another user or group connected. It is logged; the peer gets no answer."""

    code = "NVSHIM-E0014"
    status = Status.PERMISSION_DENIED
    remedy = "connect as the user that the server runs as"


class HandlerFailed(TtrpcError):
    """A handler raised something that is not an ``NvshimError``, or returned the wrong type."""

    code = "NVSHIM-E0015"
    status = Status.INTERNAL
    remedy = "report this with the log of containerd: it is a fault of nvshim"


class TypeMismatch(TtrpcError):
    """An ``Any`` holds another type than expected. Raised by :mod:`api.typeurl`."""

    code = "NVSHIM-E0016"
    status = Status.INVALID_ARGUMENT
    remedy = "see that the client sends what this call takes"
