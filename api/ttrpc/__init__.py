"""ttrpc for Python: the protocol between containerd and its shims.

ttrpc is gRPC for processes on one machine: the same services and protobuf messages, without HTTP/2,
over a unix socket. This package speaks version 1.2 of the protocol (unary calls and streams).

**Without sockets** (this module): :class:`ServerConnection` and :class:`ClientConnection` are only
the protocol, with bytes in and events out, for any loop and for tests. Services, errors and events
are here, too. The shim drives them from its own loop.

**A server** for programs on anyio (:mod:`api.ttrpc.server`) offers services on a listening socket::

    async def state(context: Context, request: StateRequest) -> StateResponse:
        if request.id not in tasks:
            raise TaskNotFound(...)            # an NvshimError: its status and its str() are sent
        return StateResponse(id=request.id)

    service = Service(task_pb2.DESCRIPTOR.services_by_name["Task"], {"State": state})
    server = Server([service], log=lambda event, fields: ...)
    await server.serve(listener)               # until server.close() or server.shutdown()

Every request runs in its own task, which is cancelled when its client disconnects or the client's
timeout has passed. A handler that must not stop half way must shield itself. Other exceptions of a
handler are logged, and answered with INTERNAL. The server serves only processes of its own user and
group.

**A client** (:mod:`api.ttrpc.client`) is a connection::

    async with connect("/run/containerd/s/1234") as client:
        response = await client.call(
            "containerd.task.v2.Task", "State", StateRequest(id="web"), StateResponse, timeout=5
        )

Calls may run at the same time, and may be cancelled. If the connection is lost, all of them fail
with :class:`ConnectionClosed`, and ``client.closed`` is true; reconnecting is the caller's
decision. ``Client(await dial(path), task_group)`` does the same in an existing task group.

**Streams**: a method that streams gets a :class:`Stream` instead of the request. A client opens one
    with ``async with client.stream(service, Method.of(descriptor))`` and then sends, finishes and
    receives.

The rules are stated where they are implemented: errors in :mod:`api.ttrpc.errors`, protocol
violations in :mod:`api.ttrpc.connection`, stream states in :mod:`api.ttrpc.streams`, limits in
:mod:`api.ttrpc.inbox` and :mod:`api.ttrpc.transport`.
"""

from api.ttrpc.connection import ClientConnection, ServerConnection
from api.ttrpc.errors import (
    ConnectFailed,
    ConnectionClosed,
    DeadlineExceeded,
    HandlerFailed,
    LocalProtocolError,
    MessageTooLarge,
    Overloaded,
    PeerRejected,
    RemoteError,
    RemoteProtocolError,
    ShuttingDown,
    StreamClosed,
    TtrpcError,
    TypeMismatch,
    UndecodableMessage,
    Unimplemented,
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
from api.ttrpc.service import (
    Context,
    Credentials,
    Handler,
    ImmediateHandler,
    Method,
    Service,
    Stream,
)

__all__ = [
    "ClientConnection",
    "ConnectFailed",
    "ConnectionClosed",
    "Context",
    "Credentials",
    "DataReceived",
    "DeadlineExceeded",
    "Ended",
    "Event",
    "FrameIgnored",
    "Handler",
    "HandlerFailed",
    "ImmediateHandler",
    "LocalProtocolError",
    "MessageTooLarge",
    "Method",
    "Overloaded",
    "PeerRejected",
    "RemoteError",
    "RemoteProtocolError",
    "RequestReceived",
    "ResponseReceived",
    "ServerConnection",
    "Service",
    "ShuttingDown",
    "Stream",
    "StreamClosed",
    "StreamFailed",
    "TtrpcError",
    "TypeMismatch",
    "UndecodableMessage",
    "Unimplemented",
]
