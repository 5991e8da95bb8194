"""Services: which methods there are, what they take and give, and who handles them.

A :class:`Service` joins a protobuf service descriptor (what there is) to a mapping of handlers
(what we do). A method without a handler is answered UNIMPLEMENTED, as if it did not exist.

Three kinds of handlers, the first two told apart by the method's descriptor::

    async def state(context: Context, request: StateRequest) -> StateResponse: ...

    async def watch(context: Context, stream: Stream) -> Message | None: ...

    def pids(context: Context, request: PidsRequest) -> PidsResponse: ...

The second is for methods that stream in either direction. ``stream.receive()`` (or ``async
for``) gives the client's messages, also the single request of a method that streams only its
answer; ``stream.send()`` sends ours. A method whose answer is a single message returns it; one
that streams its answer returns None.

The third answers at once, without waiting for anything: it is called as soon as its request is
read, before what follows it on the connection, and costs neither a task nor a turn of the loop.

A client that gives up a request does not say so: ttrpc has no word for it. What waits long, and
is asked again and again by clients that go away, is therefore declared ``shared``: the same request
on one connection is one call then, and each further one costs no more than the number of its
stream.
"""

from __future__ import annotations

import math

from api.messages import message_class
from api.ttrpc.errors import LocalProtocolError
from api.values import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
    from typing import Any, Protocol, TypeAlias

    from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
    from google.protobuf.message import Message
else:
    Protocol = object


class Credentials(Record):
    """Who is at the other end of a unix socket, as the kernel wrote down when they connected."""

    pid: int
    uid: int
    gid: int


class Context:
    """What a handler may know about its call beside the request.

    Attributes:
        service: the name the client called the service by.
        method: the method's name.
        metadata: pairs of key and value in the order on the wire; keys may repeat.
        timeout: seconds that the client gave the call, None for no limit.
        deadline: when they are over, on the loop's clock; ``inf`` for no limit.
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

    def values(self, key: str) -> list[str]:
        """All values of a metadata key, in order.

        Args:
            key: compared without regard to case, as Go's ttrpc does.
        """
        key = key.lower()
        return [value for name, value in self.metadata if name.lower() == key]


class Stream(Protocol):
    """One call's messages, as its handler sees them."""

    async def receive(self) -> Any:
        """The client's next message.

        Raises:
            aio.EndOfStream: the client has sent its last one.
            UndecodableMessage: it is not of the method's request type.
        """

    async def send(self, message: Message) -> None:
        """Send a message; waits while the client does not read.

        Raises:
            LocalProtocolError: the method does not stream its answer.
            MessageTooLarge: nothing was sent, and the stream goes on.
        """

    def __aiter__(self) -> AsyncIterator[Any]: ...


Handler: TypeAlias = "Callable[[Context, Any], Awaitable[Message | None]]"
ImmediateHandler: TypeAlias = "Callable[[Context, Any], Message]"


class Method:
    """One method of a service.

    Args:
        name: its name.
        request: the class of what it takes, or what describes it.
        response: likewise, of what it gives.
        client_streaming: whether the client sends any number of messages.
        server_streaming: whether the server does.
    """

    __slots__ = ("_request", "_response", "client_streaming", "name", "server_streaming")

    def __init__(
        self,
        name: str,
        request: type[Message] | Descriptor,
        response: type[Message] | Descriptor,
        client_streaming: bool = False,  # noqa: FBT001, FBT002 - as the descriptor has them
        server_streaming: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        self.name = name
        self._request = request
        self._response = response
        self.client_streaming = client_streaming
        self.server_streaming = server_streaming

    @property
    def request(self) -> type[Message]:
        """The class of what it takes."""
        if not isinstance(self._request, type):
            self._request = message_class(self._request)
        return self._request

    @property
    def response(self) -> type[Message]:
        """The class of what it gives."""
        if not isinstance(self._response, type):
            self._response = message_class(self._response)
        return self._response

    @property
    def streaming(self) -> bool:
        """Whether either side streams."""
        return self.client_streaming or self.server_streaming

    @classmethod
    def of(cls, descriptor: MethodDescriptor) -> Method:
        """The method that a ``.proto`` file describes.

        Args:
            descriptor: for example ``service.methods_by_name["Watch"]``.
        """
        return cls(
            descriptor.name,
            descriptor.input_type,
            descriptor.output_type,
            descriptor.client_streaming,
            descriptor.server_streaming,
        )


class Service:
    """A service and its handlers.

    Args:
        descriptor: the service as generated from its ``.proto`` file.
        handlers: method names and what handles them; need not be complete.
        immediate: likewise, those that answer at once.
        shared: names of methods whose answer depends on the request message alone, and that
            change nothing. Equal requests of a client that sets no timeout share one call.
        vital: names of methods by which a client makes room, or sees what there is.
        name: the full name to serve it under, if not the descriptor's own.

    Attributes:
        methods: all of them, each with a handler to be awaited.
        immediate: those that need not be awaited.
        shared: see above.
        unlimited: those that are never refused for load: vital, immediate and shared ones.

    Raises:
        LocalProtocolError: a method that the service does not have, or one that streams and is
            to be immediate or shared.
    """

    __slots__ = ("immediate", "methods", "name", "shared", "unlimited")

    def __init__(
        self,
        descriptor: ServiceDescriptor,
        handlers: Mapping[str, Handler],
        *,
        immediate: Mapping[str, ImmediateHandler] | None = None,
        shared: Iterable[str] = (),
        vital: Iterable[str] = (),
        name: str | None = None,
    ) -> None:
        self.name = descriptor.full_name if name is None else name
        described = _methods_of(descriptor)
        at_once = dict(immediate or {})
        self.shared = frozenset(shared)
        self.unlimited = self.shared.union(vital, at_once)
        unknown = sorted({*handlers, *self.unlimited} - set(described))
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


# Of services that were asked for: a process that is forked finds them made.
_described: dict[str, tuple[ServiceDescriptor, dict[str, Method]]] = {}


def _methods_of(descriptor: ServiceDescriptor) -> dict[str, Method]:
    name = descriptor.full_name
    known = _described.get(name)
    if known is None or known[0] is not descriptor:
        methods = {method.name: Method.of(method) for method in descriptor.methods}
        known = _described[name] = (descriptor, methods)
    return known[1]


class DeferredService(Service):
    """A service that is made when the first request for it comes.

    Args:
        name: the full name to serve it under.
        load: makes it.
    """

    __slots__ = ("_load",)

    def __init__(self, name: str, load: Callable[[], Service]) -> None:
        self.name = name
        self._load = load

    def __getattr__(self, attribute: str) -> Any:
        # The attributes of a service are slots, and empty until now.
        if attribute not in Service.__slots__:
            raise AttributeError(attribute)
        service = self._load()
        self.methods, self.immediate = service.methods, service.immediate
        self.shared, self.unlimited = service.shared, service.unlimited
        return getattr(service, attribute)


def _awaitable(handler: ImmediateHandler) -> Handler:
    async def call(context: Context, request: Any) -> Message:
        return handler(context, request)

    return call
