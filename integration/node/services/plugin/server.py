"""The plugin of one resource: a gRPC server at a socket of its own, in the agent's event loop.

Rules
- ListAndWatch tells the whole list at once, and again at every change, to each of any number of
  watchers. When the server ends, the streams are ended in order, with what was told last sent.
- What is refused has the gRPC status of its error, and its one line, which the kubelet puts into
  the pod's status. What fails otherwise is an error of ours: it is logged, and the server goes on.
- A server whose listener is gone has crashed; it ends with an error, and is begun again by who
  keeps it.

Source: device plugin API v1beta1; grpc.aio.
"""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio
import grpc  # type: ignore[import-untyped] # it ships no types

from api.errors import NvshimError, one_line
from api.proto import deviceplugin_pb2 as pb
from integration.agent_errors import PluginFailed
from integration.kubelet.grpc_server import CODES, SocketServer, serialize

if TYPE_CHECKING:
    from integration.node.service import Context
    from integration.node.values.resources import Resource

_SERVICE: Final = "v1beta1.DevicePlugin"


class Answers(Protocol):
    """What kubelets are answered that no server knows itself."""

    async def allocate(self, resource: str, ids: Sequence[str]) -> pb.ContainerAllocateResponse:
        """The answer for ids of a resource, which one container is to get."""

    async def prefer(
        self, resource: str, available: Sequence[str], required: Sequence[str], size: int
    ) -> Sequence[str]:
        """Which of the available ids, with the required ones among them."""


def _list_of(resource: Resource) -> pb.ListAndWatchResponse:
    """What the kubelet is told of a resource."""
    answer = pb.ListAndWatchResponse()
    for device in resource.devices:
        health = "Healthy" if device.is_healthy else "Unhealthy"
        told = answer.devices.add(ID=device.id, health=health)
        if device.numa_node is not None:
            told.topology.nodes.add(ID=device.numa_node)
    return answer


class Server(SocketServer):
    """The server of one resource."""

    def __init__(self, path: str, resource: Resource, answers: Answers, context: Context) -> None:
        super().__init__(path)
        self.resource = resource
        self.lost = anyio.Event()
        """The last watcher has gone of itself; to be made anew by whoever waits for the next."""
        self._answers = answers
        self._say = context.say
        self._counters = context.state.counters
        self._list = _list_of(resource)
        self._version = 0
        self._news = anyio.Event()
        self._ended = False
        self._watchers = 0

    async def begin(self) -> None:
        """Listen.

        Raises:
            OtherPlugin: somebody else serves the socket.
            PluginSocketUnusable: there can be none.
        """
        await self.listen({_SERVICE: self._methods()})

    def withdraw(self) -> None:
        """Remove the socket, and have the streams end with what was told last. Safe to repeat."""
        self._ended = True
        self._news.set()
        super().withdraw()

    def tell(self, resource: Resource) -> None:
        """Tell all watchers what there is now, if it is something else than before."""
        if resource.devices != self.resource.devices:
            self._list = _list_of(resource)
            self._version += 1
            self._news.set()
            self._news = anyio.Event()
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
                said = error
            except Exception as error:  # noqa: BLE001 - the server goes on, whatever it is
                said = PluginFailed(
                    f"{name} of {self.resource.name}",
                    found=f"{type(error).__name__}: {error}",
                    do="see the agent's log",
                )
                self._say("error", str(said), trace=traceback.format_exc())
            return await context.abort(CODES[said.status], one_line(str(said)))

        return call

    async def _list_and_watch(
        self, _request: pb.Empty, _context: Any
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        told = -1
        self._watchers += 1
        try:
            while True:
                news = self._news
                if told != self._version:
                    told = self._version
                    yield self._list
                    self._counters.updated(self.resource.name)
                elif self._ended:
                    return
                else:
                    await news.wait()
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
            ids = await self._answers.prefer(
                self.resource.name,
                each.available_deviceIDs,
                each.must_include_deviceIDs,
                each.allocation_size,
            )
            answer.container_responses.add(deviceIDs=ids)
        return answer

    async def _allocate(self, request: pb.AllocateRequest) -> pb.AllocateResponse:
        # All of them or none: the kubelet takes the answer as a whole.
        name, asked = self.resource.name, request.container_requests
        found = [await self._answers.allocate(name, each.devices_ids) for each in asked]
        return pb.AllocateResponse(container_responses=found)

    async def _pre_start(
        self, _request: pb.PreStartContainerRequest
    ) -> pb.PreStartContainerResponse:
        return pb.PreStartContainerResponse()
