"""Services: their methods, the methods' messages, and their handlers.

A :class:`Service` joins a protobuf service descriptor to a mapping of handlers. Calls of a method
without a handler are answered with UNIMPLEMENTED, as if it did not exist.

There are three kinds of handlers; a method's descriptor determines which of the first two::

    async def state(context: Context, request: StateRequest) -> StateResponse: ...

    async def watch(context: Context, stream: Stream) -> Message | None: ...

    def pids(context: Context, request: PidsRequest) -> PidsResponse: ...

The second kind is for methods that stream in either direction. ``stream.receive()`` (or ``async
for``) returns the client's messages, including the single request of a method that streams only its
answer; ``stream.send()`` sends ours. A method whose answer is a single message returns it; one that
streams its answer returns None.

The third kind answers without waiting for anything: it is called when its request is read, before
the next request on the connection, without a task or a turn of the loop.

A ttrpc client cannot cancel a request. So a method that waits long, and that clients call and
abandon repeatedly, should be ``shared``: equal requests on one connection are then one call, and
each additional one costs only the number of its stream.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from copy import copy
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from api.errors import NvshimError
from api.ttrpc.errors import LocalProtocolError

R = TypeVar("R")


class Credentials(NamedTuple):
    """The process at the other end of a unix socket, as the kernel recorded it at the connect."""

    pid: int
    uid: int
    gid: int


class Context:
    """Information about a call for its handler, besides the request.

    Attributes:
        service: the client's name for the service.
        method: the method's name.
        metadata: pairs of key and value in the order on the wire; keys may repeat.
        timeout: the client's time limit for the call in seconds; None for no limit.
        deadline: the end of the time limit, on the loop's clock; ``inf`` for no limit.
        peer: the client's process.
    """

    __slots__ = ("deadline", "metadata", "method", "peer", "service", "timeout")

    def __init__(
        self,
        service: str,
        method: str,
        metadata: tuple[tuple[str, str], ...] = (),
        *,
        timeout: float | None = None,
        deadline: float = math.inf,
        peer: Credentials,
    ) -> None:
        self.service = service
        self.method = method
        self.metadata = metadata
        self.timeout = timeout
        self.deadline = deadline
        self.peer = peer

    def __str__(self) -> str:
        return f"{self.service}/{self.method}"

    def values(self, key: str) -> list[str]:
        """Return all values of a metadata key, in order.

        Args:
            key: the key, in any case, as in Go's ttrpc.
        """
        key = key.lower()
        return [value for name, value in self.metadata if name.lower() == key]


class Stream(Protocol):
    """One call's messages, for its handler."""

    async def receive(self) -> Any:
        """Receive the client's next message.

        Raises:
            anyio.EndOfStream: the client has sent its last one.
            UndecodableMessage: it is not of the method's request type.
        """

    async def send(self, message: Message) -> None:
        """Send a message; waits while the client does not read.

        Raises:
            LocalProtocolError: the method does not stream its answer.
            MessageTooLarge: nothing was sent, and the stream can still be used.
        """

    def __aiter__(self) -> AsyncIterator[Any]: ...


# With two arguments, context and request; with three in a service that is bound.
Handler: TypeAlias = "Callable[..., Awaitable[Message | None]]"
ImmediateHandler: TypeAlias = "Callable[..., Message]"

Translate: TypeAlias = "Callable[[BaseException, Context, Any], NvshimError | None]"


class Method:
    """One method of a service.

    Args:
        name: its name.
        request: the class of its request.
        response: the class of its response.
        client_streaming: whether the client sends any number of messages.
        server_streaming: whether the server does.
    """

    __slots__ = ("client_streaming", "name", "request", "response", "server_streaming")

    def __init__(
        self,
        name: str,
        request: type[Message],
        response: type[Message],
        client_streaming: bool = False,  # noqa: FBT001, FBT002 - as the descriptor has them
        server_streaming: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        self.name = name
        self.request = request
        self.response = response
        self.client_streaming = client_streaming
        self.server_streaming = server_streaming

    @property
    def streaming(self) -> bool:
        """Whether either side streams."""
        return self.client_streaming or self.server_streaming

    @classmethod
    def of(cls, descriptor: MethodDescriptor) -> Method:
        """Return a ``.proto`` file's method.

        Args:
            descriptor: for example ``service.methods_by_name["Watch"]``.
        """
        return cls(
            descriptor.name,
            GetMessageClass(descriptor.input_type),
            GetMessageClass(descriptor.output_type),
            descriptor.client_streaming,
            descriptor.server_streaming,
        )


class Service:
    """A service and its handlers.

    Args:
        descriptor: the service's, generated from its ``.proto`` file.
        handlers: handlers by method name, for all or some of the methods.
        immediate: handlers that answer at once, by method name.
        shared: names of methods without side effects whose answer depends only on the request.
            Equal requests without a timeout share one call.
        vital: names of methods with which a client frees resources.
        shielded: names of methods that complete even after a disconnect or the deadline, because
            their changes must not be left half done.
        translate: converts a handler's exception to a typed error. It gets the exception, the
            context and the request (None if undecodable), and returns None to keep the exception.
        name: the full name to serve it under; by default the descriptor's own.

    Attributes:
        methods: all methods, each with an awaitable handler.
        immediate: the handlers that need not be awaited.
        shared: see above.
        unlimited: methods that are never refused because of load: vital, immediate and shared ones.
        shielded: see above.
        translate: see above.
        target: see :meth:`bind`.

    Raises:
        LocalProtocolError: the service does not have a named method, or an immediate or shared
            method streams.
    """

    __slots__ = (
        "immediate",
        "methods",
        "name",
        "shared",
        "shielded",
        "target",
        "translate",
        "unlimited",
    )

    def __init__(
        self,
        descriptor: ServiceDescriptor,
        handlers: Mapping[str, Handler],
        *,
        immediate: Mapping[str, ImmediateHandler] | None = None,
        shared: Iterable[str] = (),
        vital: Iterable[str] = (),
        shielded: Iterable[str] = (),
        translate: Translate | None = None,
        name: str | None = None,
    ) -> None:
        self.name = descriptor.full_name if name is None else name
        described = {method.name: Method.of(method) for method in descriptor.methods}
        at_once = dict(immediate or {})
        self.shared = frozenset(shared)
        self.unlimited = self.shared.union(vital, at_once)
        self.shielded = frozenset(shielded)
        self.translate = translate
        unknown = sorted({*handlers, *self.unlimited, *self.shielded} - set(described))
        if unknown:
            raise LocalProtocolError(
                f"handlers for {', '.join(unknown)}", found=f"no such method of {self.name}"
            )
        self.methods: dict[str, tuple[Method, Handler]] = {
            method: (described[method], handler) for method, handler in handlers.items()
        }
        self.immediate: dict[str, tuple[Method, ImmediateHandler]] = {
            method: (described[method], handler) for method, handler in at_once.items()
        }
        for word in (*at_once, *self.shared):
            if described[word].streaming:
                raise LocalProtocolError(
                    f"an immediate or shared handler for {word}", found="a method that streams"
                )
        for method, handler in self.immediate.values():
            self.methods[method.name] = method, _awaitable(handler)
        self.target: object = None

    def bind(self, target: object) -> Self:
        """Return the service with an object as its handlers' additional first argument.

        It shares the tables, which can so be created once, from a class's functions, for all its
        instances, and before a fork for all children.
        """
        bound = copy(self)
        bound.target = target
        return bound

    def call(self, handler: Callable[..., R], context: Context, request: Any) -> R:
        """Call a handler."""
        if self.target is None:
            return handler(context, request)
        return handler(self.target, context, request)


def _awaitable(handler: ImmediateHandler) -> Handler:
    async def call(*arguments: Any) -> Message:
        return handler(*arguments)

    return call
