"""Handlers of the echo service, and its client."""

from __future__ import annotations

from typing import Any

import anyio
from google.protobuf import descriptor_pb2, descriptor_pool, wrappers_pb2
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.wrappers_pb2 import StringValue

from api.errors import NvshimError, Status
from api.ttrpc import Context, Method, RemoteError

NAME = "nvshim.test.Echo"
# name: (client streams, server streams)
METHODS = {
    "Say": (False, False),
    "Other": (False, False),
    "Collect": (True, False),
    "Count": (False, True),
    "Chat": (True, True),
}


def _describe() -> ServiceDescriptor:
    package, _, name = NAME.rpartition(".")
    file = descriptor_pb2.FileDescriptorProto(
        name="nvshim/test/echo.proto",
        package=package,
        syntax="proto3",
        dependency=[wrappers_pb2.DESCRIPTOR.name],
    )
    service = file.service.add(name=name)
    for method, (client, server) in METHODS.items():
        service.method.add(
            name=method,
            input_type=".google.protobuf.StringValue",
            output_type=".google.protobuf.StringValue",
            client_streaming=client,
            server_streaming=server,
        )
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindServiceByName(NAME)


DESCRIPTOR = _describe()
LARGE = "x" * (3 << 20)


class OutOfCheese(NvshimError):
    """A typed failure of a handler."""

    code = "NVSHIM-E9999"
    status = Status.FAILED_PRECONDITION


async def echo(_: Context, request: StringValue) -> StringValue:
    return StringValue(value=request.value)


def echo_at_once(_: Context, request: StringValue) -> StringValue:
    return StringValue(value=request.value)


class Gate:
    """A handler that waits until ``open`` is set, then answers or raises ``failure``."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.open = anyio.Event()
        self.failure = failure
        self.cancelled: list[str] = []  # the requests

    async def __call__(self, _: Context, request: StringValue) -> StringValue:
        try:
            await self.open.wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled.append(request.value)
            raise
        if self.failure is not None:
            raise self.failure
        return StringValue(value=request.value.upper())


class Caller:
    """Calls the echo service, any number of times in parallel."""

    def __init__(self, client: Any, served: Any = None) -> None:
        self.client = client
        self.served = served
        self.outcomes: list[object] = []  # of :meth:`ask`: the answer, or the error's status

    async def say(
        self, text: str = "hi", *, method: str = "Say", service: str = NAME, **options: Any
    ) -> str:
        answer = await self.client.call(
            service, method, StringValue(value=text), StringValue, **options
        )
        return str(answer.value)

    async def ask(self, text: str = "hi") -> None:
        try:
            self.outcomes.append(await self.say(text))
        except RemoteError as error:
            self.outcomes.append(error.status)

    def open(self, method: str, request: StringValue | None = None, **options: Any) -> Any:
        """Open a streaming call as a context."""
        described = Method.of(DESCRIPTOR.methods_by_name[method])
        return self.client.stream(NAME, described, request, **options)

    async def other(self) -> str:
        """Call another method; afterwards the server has read all earlier data."""
        return await self.say(method="Other")
