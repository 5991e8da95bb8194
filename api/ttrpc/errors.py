"""The errors of the protocol, by origin and remedy.

As in h11, a protocol error is *local* (our call is not allowed: fix the caller) or *remote* (the
peer's fault). The core assigns the type only where the peer's bytes enter.
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


class TtrpcError(NvshimError, code="NVSHIM-E0001", status=Status.UNKNOWN):
    """A failure on the wire: the branch of all errors in this module."""


class RemoteProtocolError(
    TtrpcError,
    code="NVSHIM-E0003",
    status=Status.INVALID_ARGUMENT,
    remedy="see which program is at the other end, and its log",
):
    """The peer broke the protocol, on one stream or (if raised by the core) for all of them."""


class RemoteError(TtrpcError, code="NVSHIM-E0005", status=Status.UNKNOWN):
    """The peer answered with a status other than OK. Raised by the client's calls.

    Args:
        asked: the call, ``service/method``.
        status: the peer's status code, one of :class:`api.errors.Status`, and this error's own
            ``status``, so a handler that passes it on answers with the same code.
        message: the peer's unchanged message; in ``str()`` it is one bounded line.
        details: the peer's details, each an ``Any``.
    """

    def __init__(
        self, asked: str, *, status: int, message: str, details: Iterable[Any] = ()
    ) -> None:
        super().__init__(asked, found=message or f"status {status} without a message")
        self.status = status  # only this error has the peer's status
        self.message = message
        self.details = tuple(details)


class ConnectionClosed(TtrpcError, code="NVSHIM-E0007", status=Status.UNAVAILABLE):
    """The connection ended before the call did. Raised by calls; connect again to go on."""


class MessageTooLarge(
    TtrpcError,
    code="NVSHIM-E0011",
    status=Status.RESOURCE_EXHAUSTED,
    remedy="send less in one message",
):
    """A message is larger than the 4 MiB that the protocol allows, ours or the peer's."""


class PeerRejected(
    TtrpcError,
    code="NVSHIM-E0014",
    status=Status.PERMISSION_DENIED,
    remedy="connect as the user that the server runs as",
):
    """A process of another user or group connected. It is logged; the peer gets no answer."""


class HandlerFailed(
    TtrpcError,
    code="NVSHIM-E0015",
    status=Status.INTERNAL,
    remedy="report this with the log of containerd: it is a fault of nvshim",
):
    """A handler raised something that is not an ``NvshimError``, or returned the wrong type."""


# fmt: off
LocalProtocolError = TtrpcError.row("NVSHIM-E0002 local-protocol-error", Status.INTERNAL,
    "Our call is not allowed by the protocol now.",
    remedy="report this: it is a fault of nvshim")
UndecodableMessage = RemoteProtocolError.row(
    "NVSHIM-E0004 undecodable-message", Status.INVALID_ARGUMENT,
    "The peer sent bytes that are not the protobuf message that belongs there.",
    remedy="check that both ends have compatible releases")
ConnectFailed = TtrpcError.row("NVSHIM-E0006 connect-failed", Status.UNAVAILABLE,
    "No server answers at an address.",
    remedy="check that the server runs and listens there")
StreamClosed = TtrpcError.row("NVSHIM-E0008 stream-closed", Status.FAILED_PRECONDITION,
    "The peer has ended the stream we want to send on; its answer can still be received.",
    remedy="read the answer that has come, and start the call again")
Unimplemented = TtrpcError.row("NVSHIM-E0009 unimplemented", Status.UNIMPLEMENTED,
    "The server has no such service, or the service no handler for the method.",
    remedy="use a release that has this call")
DeadlineExceeded = TtrpcError.row("NVSHIM-E0010 deadline-exceeded", Status.DEADLINE_EXCEEDED,
    "A call took longer than its timeout, whichever side noticed first.",
    remedy="try again, and see the log of the program that did not answer")
Overloaded = TtrpcError.row("NVSHIM-E0012 overloaded", Status.RESOURCE_EXHAUSTED,
    "One connection holds more streams or bytes than we keep for one peer.",
    remedy="wait for an answer first")
ShuttingDown = TtrpcError.row("NVSHIM-E0013 shutting-down", Status.UNAVAILABLE,
    "A request came after the server had been told to stop.",
    remedy="create it once more")
TypeMismatch = TtrpcError.row("NVSHIM-E0016 type-mismatch", Status.INVALID_ARGUMENT,
    "An ``Any`` holds another type than expected.",
    remedy="see that the client sends what this call takes")
