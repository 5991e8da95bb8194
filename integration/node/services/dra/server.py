"""The driver's sockets: registration, preparing claims and taking them back, and health.

::

    KUBELET/plugins_registry/DRIVER[-POD]-reg.sock   GetInfo, NotifyRegistrationStatus
    KUBELET/plugins/DRIVER/dra[-POD].sock            NodePrepareResources, NodeUnprepareResources,
                                                     and NodeWatchResources
    KUBELET/plugins/DRIVER/dra.sock                  likewise, of the driver at work

Rules
- The socket of the driver is there before that of its registration. A kubelet watches for the
  latter; one that restarts looks for it, so there is nothing to be done then. When the agent ends,
  calls under way are finished before the registration goes: the kubelet may hang up with it.
- Sockets that are gone are made anew. A kubelet that is not there is waited for.
- Each version is served in both forms that kubelets call, v1 first: they take the first they know.

Rules of updates, in which two instances run for a while
- An instance that runs in a pod has the pod's UID in the names of its sockets, so that it takes no
  other's away. Where a path would be too long for a socket, a digest stands for the UID.
- One of them is at work: it has the agent's lock of the node, and does all that the agent does
  besides. It serves a socket without a UID as well, by which the other one passes calls on to it
  (the kubelet calls the newer one that it is connected to). While none is at work, calls wait, for
  as long as whoever has called does.
- The other one is at work once it has the lock. Its sockets stay as they are: a kubelet hears of
  nothing. A pod is ready when it serves; then its predecessor is told to end.
- Sockets that nobody serves, which instances have left that were killed, are removed by the next at
  work: a kubelet that begins would try each of them first.

Source: Kubernetes kubelet pkg/kubelet/cm/dra/plugin, pkg/kubelet/pluginmanager; its Go helper,
kubeletplugin (RollingUpdate); DaemonSet, ``maxSurge``; unix(7).
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread
import grpc  # type: ignore[import-untyped] # it ships no types

from api.errors import one_line
from api.proto import dra_health_pb2 as health_pb
from api.proto import dra_pb2 as pb
from api.proto import pluginregistration_pb2 as registration
from hooks.node.kubelet import kubelet_root
from integration.agent_errors import PluginFailed, ServingError
from integration.backoff import Backoff
from integration.kubelet import sockets
from integration.kubelet.grpc_server import SocketServer, serialize
from integration.node.services.dra.rpc import TO_FINISH, Answering, Ended, Refused, Relay
from integration.watcher import ANY, Watcher, first_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping

    import anyio.abc

    from integration.node.lock import NodeLock
    from integration.node.service import Context
    from integration.node.services.dra.rpc import Answers

__all__ = ["Places", "Serving", "places_of", "stand_by"]

_PACKAGES: Final = ("k8s.io.kubelet.pkg.apis.dra.v1", "k8s.io.kubelet.pkg.apis.dra.v1beta1")
_HEALTH: Final = ("v1", "v1alpha1")
VERSIONS: Final = (
    "v1.DRAPlugin",
    "v1beta1.DRAPlugin",
    *(f"{version}.DRAResourceHealth" for version in _HEALTH),
)

_DIRECTORY_MODE: Final = 0o750
# Seconds after which it is tried again to pass a call on.
_AGAIN: Final = 0.2
# Seconds that calls have whose socket is to be made anew.
_TO_END: Final = 1.0

_DIGEST: Final = 12
_UID: Final = "(-[A-Za-z0-9-]{1,63})?"


@dataclass(frozen=True, slots=True)
class Places:
    """The paths."""

    registry: str  # the directory in which the kubelet looks for instances
    directory: str  # the driver's
    driver: str
    registration: str  # the socket by which the kubelet finds this instance
    endpoint: str  # the socket at which it calls this instance
    common: str  # the socket of whoever is at work

    def sweep(self) -> None:
        """Remove the sockets that instances have left which were killed."""
        for path in self._others():
            seen = sockets.identity_of(path)
            if seen is not None and not sockets.is_served(path):
                sockets.remove(path, seen)

    def _others(self) -> Iterator[str]:
        names = {
            self.registry: re.compile(f"{re.escape(self.driver)}{_UID}-reg[.]sock"),
            self.directory: re.compile(f"dra{_UID}[.]sock"),
        }
        for directory, pattern in names.items():
            with suppress(OSError):  # it is not there
                for name in os.listdir(directory):
                    if pattern.fullmatch(name):
                        yield os.path.join(directory, name)


def places_of(root: str, driver: str, pod: str) -> Places:
    """Where the sockets of an instance are.

    Args:
        pod: the UID of the instance's; "" for the only one.
    """
    registry = os.path.join(root, "plugins_registry")
    directory = os.path.join(root, "plugins", driver)
    for uid in (pod, hashlib.sha256(pod.encode()).hexdigest()[:_DIGEST]):
        part = f"-{uid}" if pod else ""
        paths = (
            os.path.join(registry, f"{driver}{part}-reg.sock"),
            os.path.join(directory, f"dra{part}.sock"),
        )
        if all(len(os.fsencode(path)) <= sockets.LONGEST for path in paths):
            break
    return Places(registry, directory, driver, *paths, os.path.join(directory, "dra.sock"))


class Serving:
    """The driver's sockets.

    Args:
        relay: leads to the driver that is at work; None if we are to be, or nobody is.
    """

    def __init__(self, context: Context, relay: Relay | None = None) -> None:
        options = context.options
        self._context = context
        self._driver = options.dra_driver
        root = kubelet_root(context.config)
        self._places = places_of(root, options.dra_driver, options.pod_uid)
        self._relay = relay
        self._at_work: Answering | None = None
        self._changed = anyio.Event()
        self._ends = anyio.Event()
        self.in_place = anyio.Event()
        """Set once the kubelet has found the sockets, or can."""

    async def run(self) -> None:
        """Serve until cancelled."""
        places = self._places
        own = {places.endpoint: self._services(), places.registration: self._registration()}
        try:
            await self._keep("kubelet", own, self._end)
        finally:
            self._end()

    def _end(self) -> None:
        self._ends.set()
        self._wake()

    def succeed(self) -> None:
        """Pass nothing on any more: who was at work has ended, and we will be."""
        self._relay = None

    async def work(self, answers: Answers) -> None:
        """Be the driver at work, until cancelled."""
        places = self._places
        await anyio.to_thread.run_sync(places.sweep)
        async with anyio.create_task_group() as tasks:
            at_work = self._at_work = Answering(self._context, answers, tasks)
            self._wake()

            def end() -> None:
                self._at_work = None
                at_work.end()
                self._wake()

            try:
                if places.common == places.endpoint:
                    await anyio.sleep_forever()
                await self._keep("instances", {places.common: self._services()}, end)
            finally:
                end()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _keep(
        self, whom: str, doors: Mapping[str, Mapping[str, Any]], end: Callable[[], None]
    ) -> None:
        """Serve at sockets, in this order, until cancelled.

        Args:
            whom: they are for.
            end: called first then.
        """
        backoff = Backoff()
        while True:
            begun = time.monotonic()
            try:
                await self._serve(whom, doors, end)
            except (ServingError, OSError) as error:
                self._fault(whom, str(error))
                await anyio.sleep(backoff.pause(time.monotonic() - begun))

    async def _serve(
        self, whom: str, doors: Mapping[str, Mapping[str, Any]], end: Callable[[], None]
    ) -> None:
        """Serve until a socket is gone."""
        registry, directory = self._places.registry, self._places.directory
        servers: list[SocketServer] = []
        to_end = _TO_END
        with Watcher(quiet=0) as watcher:
            while not _is_there(registry):
                await watcher.change({registry: ANY})
            os.makedirs(directory, mode=_DIRECTORY_MODE, exist_ok=True)
            try:
                for path, services in doors.items():
                    servers.append(SocketServer(path))
                    await servers[-1].listen(services)
                self._fault(whom, "")
                self._context.say("info", "serves", driver=self._driver, socket=next(iter(doors)))
                if self._places.registration in doors:
                    self.in_place.set()

                async def is_gone() -> None:
                    while all(each.is_in_place for each in servers):
                        await watcher.change({registry: ANY, directory: ANY})

                which, _ = await first_of(*(each.crash for each in servers), is_gone)
            except anyio.get_cancelled_exc_class():
                end()
                to_end += TO_FINISH
                raise
            finally:
                for each in servers:
                    await each.end(to_end)
        if which < len(servers):
            raise PluginFailed(
                f"to serve {self._driver}",
                found="its server has ended by itself",
                do="it is begun again",
            )

    def _fault(self, concern: str, line: str) -> None:
        self._context.fault(f"dra {concern}", one_line(line), part="dra")

    # What a kubelet calls

    def _registration(self) -> dict[str, Any]:
        async def info(_request: Any, _context: Any) -> registration.PluginInfo:
            return registration.PluginInfo(
                type="DRAPlugin",
                name=self._driver,
                endpoint=self._places.endpoint,
                supported_versions=VERSIONS,
            )

        async def status(
            request: registration.RegistrationStatus, _context: Any
        ) -> registration.RegistrationStatusResponse:
            if request.plugin_registered:
                self._context.say("info", "registered", driver=self._driver)
            error = one_line(request.error) or "no reason is given"
            line = "" if request.plugin_registered else f"the kubelet does not register it: {error}"
            self._fault("registration", line)
            return registration.RegistrationStatusResponse()

        return {
            "pluginregistration.Registration": {
                "GetInfo": _unary(info, registration.InfoRequest),
                "NotifyRegistrationStatus": _unary(status, registration.RegistrationStatus),
            }
        }

    def _services(self) -> dict[str, dict[str, Any]]:
        plugins = (f"{package}.DRAPlugin" for package in _PACKAGES)
        healths = (f"{version}.DRAResourceHealth" for version in _HEALTH)
        return {
            **{service: self._plugin(service) for service in plugins},
            **{service: self._health(service) for service in healths},
        }

    def _plugin(self, service: str) -> dict[str, Any]:
        prepare = partial(Answering.prepare, knows_shares=service.startswith(f"{_PACKAGES[0]}."))
        methods = (
            (prepare, pb.NodePrepareResourcesRequest, pb.NodePrepareResourcesResponse),
            (Answering.unprepare, pb.NodeUnprepareResourcesRequest,
             pb.NodeUnprepareResourcesResponse),
        )  # fmt: skip
        handlers = {}
        for do, request, kind in methods:
            name = request.DESCRIPTOR.name.removesuffix("Request")
            handlers[name] = _unary(partial(self._answer, do, f"/{service}/{name}", kind), request)
        return handlers

    def _health(self, service: str) -> dict[str, Any]:
        name = "NodeWatchResources"
        handler = grpc.unary_stream_rpc_method_handler(
            partial(self._watch, f"/{service}/{name}"),
            request_deserializer=health_pb.NodeWatchResourcesRequest.FromString,
            response_serializer=serialize,
        )
        return {name: handler}

    async def _answer(
        self, do: Callable[..., Awaitable[Any]], method: str, kind: Any, request: Any, call: Any
    ) -> Any:
        """The answer of the driver at work, whoever is that in the end.

        Args:
            do: makes it, if that is us.
        """
        answer = None
        while answer is None:
            if (at_work := self._at_work) is not None:
                with suppress(Ended):
                    return await do(at_work, request)
            elif (relay := self._relay) is not None:
                try:
                    answer = await relay.call(method, request, kind, call.time_remaining())
                except Refused as error:
                    await call.abort(error.code, error.details)
            if answer is None:
                await self._await_next(call)
        return answer

    async def _await_next(self, call: Any) -> None:
        """Wait a moment for another to be at work, unless nobody will be of whom we hear."""
        if self._ends.is_set():
            await call.abort(grpc.StatusCode.UNAVAILABLE, "the agent ends")
        if self._at_work is None:
            with anyio.move_on_after(_AGAIN):
                await self._changed.wait()

    async def _watch(
        self, method: str, request: health_pb.NodeWatchResourcesRequest, call: Any
    ) -> AsyncIterator[health_pb.NodeWatchResourcesResponse]:
        """What is told by the driver at work, whoever that is, for ever."""
        kind = health_pb.NodeWatchResourcesResponse
        while True:
            if (at_work := self._at_work) is not None:
                async with aclosing(at_work.watch()) as messages:
                    async for message in messages:
                        yield message
            elif (relay := self._relay) is not None:
                try:
                    async with aclosing(relay.stream(method, request, kind)) as messages:
                        async for message in messages:
                            yield message
                except Refused as error:
                    await call.abort(error.code, error.details)
            await self._await_next(call)


def _is_there(directory: str) -> bool:
    return os.path.isdir(directory)


def _unary(answer: Callable[[Any, Any], Awaitable[Any]], request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        answer, request_deserializer=request.FromString, response_serializer=serialize
    )


async def stand_by(tasks: anyio.abc.TaskGroup, context: Context, lock: NodeLock) -> Context:
    """Serve by another agent until the node is ours.

    Args:
        tasks: where the sockets are served, from now on.

    Returns:
        What the parts are given then.
    """
    options = context.options
    places = places_of(kubelet_root(context.config), options.dra_driver, options.pod_uid)
    serving = Serving(context, Relay(places.common))

    async def show() -> None:
        await serving.in_place.wait()
        lock.show_pod(options.pod_uid)

    context.say("info", "waits for the end of another agent", process=lock.holder)
    tasks.start_soon(serving.run)
    tasks.start_soon(show)
    await lock.wait()
    serving.succeed()
    return replace(context, serving=serving)
