"""The plugin of one resource: a gRPC server at a socket of its own, in the agent's event loop.

Rules
- ListAndWatch sends the whole list at once, and again after every change, to any number of
  watchers. When the server stops, it sends the latest list before it closes the streams.
- A refused call returns the gRPC status and the one-line message of its error, which the kubelet
  puts into the pod's status. Any other exception is a defect of the agent: the server logs it and
  continues.
- A server whose listener is gone has crashed: it raises an error, and its caller starts a new one.

Source: device plugin API v1beta1; grpc.aio.
"""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

import anyio
import grpc  # type: ignore[import-untyped] # it ships no types

from api.errors import NvshimError, one_line
from api.proto import deviceplugin_pb2 as pb
from integration.agent_errors import PluginFailed
from integration.kubelet.grpc_server import CODES, SocketServer, serialize
from integration.node.service import Context
from integration.node.values.resources import Resource
from integration.node.values.service_name import ServiceName

_SERVICE: Final = "v1beta1.DevicePlugin"


class Answers(Protocol):
    """The decisions behind the calls of a kubelet."""

    async def allocate(self, resource: str, ids: Sequence[str]) -> pb.ContainerAllocateResponse:
        """Return the response for one container that gets these ids of a resource."""

    def prefer(
        self, resource: str, available: Sequence[str], required: Sequence[str], size: int
    ) -> Sequence[str]:
        """Return the preferred ones of the available ids, including the required ones."""


def _list_of(resource: Resource) -> pb.ListAndWatchResponse:
    """Return the kubelet's list of a resource's devices."""
    answer = pb.ListAndWatchResponse()
    for device in resource.devices:
        health = "Healthy" if device.is_healthy else "Unhealthy"
        entry = answer.devices.add(ID=device.id, health=health)
        if device.numa_node is not None:
            entry.topology.nodes.add(ID=device.numa_node)
    return answer


class Server(SocketServer):
    """The server of one resource."""

    def __init__(self, path: str, resource: Resource, answers: Answers, context: Context) -> None:
        super().__init__(path)
        self.resource = resource
        self.lost = anyio.Event()
        """Set when the last watcher disconnects. A caller that waits again replaces it first."""
        self._answers = answers
        self._say = context.say
        self._counters = context.state.counters
        self._announced = context.state.announced.publisher(ServiceName.PLUGIN)
        self._list = _list_of(resource)
        self._version = 0
        self._changed = anyio.Event()
        self._ended = False
        self._watchers = 0

    async def start(self) -> None:
        """Start to listen.

        Raises:
            OtherPlugin: another program serves the socket.
            PluginSocketUnusable: the socket cannot be created.
        """
        await self.listen({_SERVICE: self._methods()})

    def withdraw(self) -> None:
        """Remove the socket, and close the streams after the latest list. Safe to repeat."""
        self._ended = True
        self._changed.set()
        super().withdraw()

    def update(self, resource: Resource) -> None:
        """Send the new list to all watchers if the devices changed."""
        if resource.devices != self.resource.devices:
            self._list = _list_of(resource)
            self._version += 1
            self._changed.set()
            self._changed = anyio.Event()
        self.resource = resource

    # What a kubelet calls

    def _methods(self) -> dict[str, Any]:
        unary: dict[str, tuple[Any, Any]] = {
            "GetDevicePluginOptions": (self._options, pb.Empty),
            "GetPreferredAllocation": (self._prefer, pb.PreferredAllocationRequest),
            "Allocate": (self._allocate, pb.AllocateRequest),
            "PreStartContainer": (self._pre_start, pb.PreStartContainerRequest),
        }
        methods = {
            name: grpc.unary_unary_rpc_method_handler(
                self._guarded(name, method),
                request_deserializer=request.FromString,
                response_serializer=serialize,
            )
            for name, (method, request) in unary.items()
        }
        methods["ListAndWatch"] = grpc.unary_stream_rpc_method_handler(
            self._list_and_watch,
            request_deserializer=pb.Empty.FromString,
            response_serializer=serialize,
        )
        return methods

    def _guarded(self, name: str, method: Callable[[Any], Awaitable[Any]]) -> Any:
        async def call(request: Any, context: Any) -> Any:
            try:
                return await method(request)
            except NvshimError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - the server survives any defect
                failure = PluginFailed(
                    f"{name} of {self.resource.name}",
                    found=f"{type(error).__name__}: {error}",
                    do="see the agent's log",
                )
                self._say("error", str(failure), trace=traceback.format_exc())
            return await context.abort(CODES[failure.status], one_line(str(failure)))

        return call

    async def _list_and_watch(
        self, _request: pb.Empty, _context: Any
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        sent = -1
        self._watchers += 1
        try:
            while True:
                changed = self._changed
                if sent != self._version:
                    sent = self._version
                    yield self._list
                    self._counters.updated(self.resource.name)
                    self._announced.publish(True)
                elif self._ended:
                    return
                else:
                    await changed.wait()
        finally:
            self._watchers -= 1
            if not self._watchers and not self._ended:
                self.lost.set()

    async def _options(self, _request: pb.Empty) -> pb.DevicePluginOptions:
        return pb.DevicePluginOptions(get_preferred_allocation_available=True)

    async def _prefer(
        self, request: pb.PreferredAllocationRequest
    ) -> pb.PreferredAllocationResponse:
        answer = pb.PreferredAllocationResponse()
        for each in request.container_requests:
            ids = self._answers.prefer(
                self.resource.name,
                each.available_deviceIDs,
                each.must_include_deviceIDs,
                each.allocation_size,
            )
            answer.container_responses.add(deviceIDs=ids)
        return answer

    async def _allocate(self, request: pb.AllocateRequest) -> pb.AllocateResponse:
        # All containers or none: the kubelet uses the response as a whole.
        name, requests = self.resource.name, request.container_requests
        answers = [await self._answers.allocate(name, each.devices_ids) for each in requests]
        return pb.AllocateResponse(container_responses=answers)

    async def _pre_start(
        self, _request: pb.PreStartContainerRequest
    ) -> pb.PreStartContainerResponse:
        return pb.PreStartContainerResponse()
