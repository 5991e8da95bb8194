"""Services: their methods, the methods' messages, and their handlers.

A :class:`Service` joins a protobuf service descriptor to a mapping of handlers. A method without a
handler is answered UNIMPLEMENTED, as if it did not exist.

Two kinds of handlers::

    async def state(context: Context, request: StateRequest) -> StateResponse: ...

    def pids(context: Context, request: PidsRequest) -> PidsResponse: ...

The second answers at once, without waiting for anything: it is called as soon as its request is
read, before what follows it on the connection, and costs neither a task nor a turn of the loop.

A client that gives up a request does not say so: ttrpc has no word for it. What waits long, and
is asked again and again by clients that go away, is therefore declared ``shared``: the same request
on one connection is one call then, and each further one costs no more than the number of its
stream.
"""

from __future__ import annotations

import math
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, TypeVar

from google.protobuf.message_factory import GetMessageClass

from api.ttrpc.errors import LocalProtocolError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
    from google.protobuf.message import Message

    from api.errors import NvshimError


R = TypeVar("R")


class Credentials(NamedTuple):
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
        deadline: when that ends, on the loop's clock; ``inf`` for no limit.
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
        """All values of a metadata key, in order.

        Args:
            key: compared without regard to case, as Go's ttrpc does.
        """
        key = key.lower()
        return [value for name, value in self.metadata if name.lower() == key]


# With two arguments, context and request; with three in a service that is bound.
Handler: TypeAlias = "Callable[..., Awaitable[Message]]"
ImmediateHandler: TypeAlias = "Callable[..., Message]"

Translate: TypeAlias = "Callable[[BaseException, Context, Any], NvshimError | None]"


class Method(NamedTuple):
    """One method of a service: its name, and the classes of what it takes and gives."""

    name: str
    request: type[Message]
    response: type[Message]

    @classmethod
    def of(cls, descriptor: MethodDescriptor) -> Self:
        """The method that a ``.proto`` file describes.

        Args:
            descriptor: for example ``service.methods_by_name["State"]``.
        """
        return cls(
            descriptor.name,
            GetMessageClass(descriptor.input_type),
            GetMessageClass(descriptor.output_type),
        )


class Service:
    """A service and its handlers.

    Args:
        descriptor: the service as generated from its ``.proto`` file.
        handlers: method names and what handles them; need not be complete.
        immediate: likewise, those that answer at once.
        shared: names of methods whose answer depends on the request message alone, and that
            change nothing. Equal requests of a client that sets no timeout share one call.
        vital: names of methods by which a client frees resources.
        shielded: names of methods that complete although their client is gone, or its time is
            over: what they change must not be left half done.
        translate: makes a typed error of what a handler has raised: it gets the exception, the
            context and the request (None if that could not be decoded); None to leave it as it is.
        name: the full name to serve it under, if not the descriptor's own.

    Attributes:
        methods: all of them, each with a handler to be awaited.
        immediate: those that need not be awaited.
        shared: see above.
        unlimited: those that are never refused for load: vital, immediate and shared ones.
        shielded: see above.
        translate: see above.
        target: see :meth:`bind`.

    Raises:
        LocalProtocolError: a method that the service does not have, or one that streams, which
            nothing here does.
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
            name: (described[name], handler) for name, handler in handlers.items()
        }
        self.immediate: dict[str, tuple[Method, ImmediateHandler]] = {
            name: (described[name], handler) for name, handler in at_once.items()
        }
        for word in (*handlers, *at_once):
            method = descriptor.methods_by_name[word]
            if method.client_streaming or method.server_streaming:
                raise LocalProtocolError(f"a handler for {word}", found="a method that streams")
        for known, handler in self.immediate.values():
            self.methods[known.name] = known, _awaitable(handler)
        self.target: object = None

    def bind(self, target: object) -> Self:
        """The same service, whose handlers get an object as a further, first argument.

        It shares the tables. So they can be made once, of a class's functions, for all of its
        instances; and before a fork, for all of the children.
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
