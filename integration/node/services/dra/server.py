"""The driver's sockets: registration, preparing and unpreparing claims, and health.

::

    KUBELET/plugins_registry/DRIVER[-POD]-reg.sock   GetInfo, NotifyRegistrationStatus
    KUBELET/plugins/DRIVER/dra[-POD].sock            NodePrepareResources, NodeUnprepareResources,
                                                     and NodeWatchResources
    KUBELET/plugins/DRIVER/dra.sock                  the same, of the active instance

Rules
- The driver's socket exists before its registration socket, which the kubelet watches for, and
  looks for after a restart. When the agent exits, calls in progress finish before the registration
  socket is removed, since the kubelet may then close the connection.
- Sockets that were removed are created again. If there is no kubelet, the driver waits for it.
- Each API is served in both versions that kubelets call, v1 first: they take the first one they
  know.

Rules for updates, during which two instances run
- An instance in a pod has the pod's UID in the names of its sockets, so that they do not replace
  those of the other. If a path would be too long for a socket, a digest replaces the UID.
- The active instance holds the node's lock, and does all the work of the agent. It also serves a
  socket without a UID. The other instance relays calls to that socket, since the kubelet calls the
  newest instance that it is connected to. While no instance is active, calls wait.
- The other instance becomes active once it has the lock. It keeps its sockets, so the kubelet
  notices nothing. Its pod is ready once it serves; then Kubernetes stops the older pod.
- The next active instance removes the sockets of instances that were killed, because a kubelet that
  starts would try each of them first.

Source: Kubernetes kubelet pkg/kubelet/cm/dra/plugin, pkg/kubelet/pluginmanager; its Go helper,
kubeletplugin (RollingUpdate); DaemonSet, ``maxSurge``; unix(7).
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import anyio
import anyio.abc
import grpc  # type: ignore[import-untyped] # it ships no types

from api.errors import one_line
from api.proto import dra_health_pb2 as health_pb
from api.proto import dra_pb2 as pb
from api.proto import pluginregistration_pb2 as registration
from hooks.node.kubelet import kubelet_root
from integration.agent_errors import FilesSilent, PluginFailed, ServingError
from integration.backoff import Backoff
from integration.kubelet import sockets
from integration.kubelet.grpc_server import SocketServer, serialize
from integration.node.lock import NodeLock
from integration.node.service import Context
from integration.node.services.dra.rpc import (
    TO_FINISH,
    ActiveDriver,
    DriverApi,
    DriverEnded,
    Relay,
    RelayRefused,
)
from integration.watcher import ANY, Watcher, first_of

__all__ = ["DriverServer", "SocketPaths", "socket_paths", "stand_by"]

_PACKAGES: Final = ("k8s.io.kubelet.pkg.apis.dra.v1", "k8s.io.kubelet.pkg.apis.dra.v1beta1")
_HEALTH: Final = ("v1", "v1alpha1")
VERSIONS: Final = (
    "v1.DRAPlugin",
    "v1beta1.DRAPlugin",
    *(f"{version}.DRAResourceHealth" for version in _HEALTH),
)

_DIRECTORY_MODE: Final = 0o750
# Seconds until a call is relayed again.
_RELAY_AGAIN: Final = 0.2
# Seconds in which calls in progress may finish before a socket is created again.
_TO_END: Final = 1.0

_DIGEST: Final = 12
_UID: Final = "(-[A-Za-z0-9-]{1,63})?"


@dataclass(frozen=True, slots=True)
class SocketPaths:
    """The paths of an instance's sockets."""

    registry: str  # the directory that the kubelet watches
    directory: str  # of the driver
    driver: str
    registration: str  # the registration socket of this instance
    endpoint: str  # the socket at which the kubelet calls this instance
    common: str  # the socket of the active instance

    def sweep(self) -> None:
        """Remove the sockets of instances that were killed."""
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
            with suppress(OSError):  # the directory does not exist
                for name in os.listdir(directory):
                    if pattern.fullmatch(name):
                        yield os.path.join(directory, name)


def socket_paths(root: str, driver: str, pod: str) -> SocketPaths:
    """Return the paths of an instance's sockets.

    Args:
        root: the kubelet's directory.
        pod: the UID of the instance's pod; "" if it does not run in one.
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
    return SocketPaths(registry, directory, driver, *paths, os.path.join(directory, "dra.sock"))


class DriverServer:
    """The driver's sockets.

    Args:
        relay: calls the active instance; None if this one is active, or is about to be.
    """

    def __init__(self, context: Context, relay: Relay | None = None) -> None:
        options = context.options
        self._context = context
        self._driver = options.dra_driver
        root = kubelet_root(context.config)
        self._paths = socket_paths(root, options.dra_driver, options.pod_uid)
        self._relay = relay
        self._active: ActiveDriver | None = None
        self._changed = anyio.Event()
        self._ends = anyio.Event()
        self.in_place = anyio.Event()
        """Set once the kubelet can find the sockets."""

    async def run(self) -> None:
        """Serve until cancelled."""
        paths = self._paths
        own = {paths.endpoint: self._services(), paths.registration: self._registration()}
        try:
            await self._keep("kubelet", own, self._end)
        finally:
            self._end()

    def _end(self) -> None:
        self._ends.set()
        self._wake()

    def succeed(self) -> None:
        """Stop relaying: the other instance ended, and this one becomes active."""
        self._relay = None

    async def work(self, driver: DriverApi) -> None:
        """Answer calls by a driver, as the active instance, until cancelled."""
        paths = self._paths
        asked = "to remove the sockets of former instances"
        try:
            await self._context.files.run(paths.directory, asked, paths.sweep)
        except FilesSilent as error:
            self._context.say("warning", str(error), part="dra")
        async with anyio.create_task_group() as tasks:
            active = self._active = ActiveDriver(self._context, driver, tasks)
            self._wake()

            def end() -> None:
                self._active = None
                active.end()
                self._wake()

            try:
                if paths.common == paths.endpoint:
                    await anyio.sleep_forever()
                await self._keep("instances", {paths.common: self._services()}, end)
            finally:
                end()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _keep(
        self, whom: str, doors: Mapping[str, Mapping[str, Any]], end: Callable[[], None]
    ) -> None:
        """Serve sockets until cancelled; after a failure, serve them again.

        Args:
            whom: the name of the caller, for messages.
            doors: the services of each socket, by its path, in the order of creation.
            end: called as soon as this is cancelled.
        """
        backoff = Backoff()
        while True:
            started = time.monotonic()
            try:
                await self._serve(whom, doors, end)
            except (ServingError, OSError, FilesSilent) as error:
                self._fault(whom, str(error))
                await anyio.sleep(backoff.pause(time.monotonic() - started))

    async def _serve(
        self, whom: str, doors: Mapping[str, Mapping[str, Any]], end: Callable[[], None]
    ) -> None:
        """Serve until a socket is removed."""
        registry, directory = self._paths.registry, self._paths.directory
        servers: list[SocketServer] = []
        to_end = _TO_END
        with Watcher(quiet=0) as watcher:
            while not await self._can_serve():
                await watcher.change({registry: ANY}, may_hang=True)
            try:
                for path, services in doors.items():
                    servers.append(SocketServer(path))
                    await servers[-1].listen(services)
                self._fault(whom, "")
                self._context.say("info", "serves", driver=self._driver, socket=next(iter(doors)))
                if self._paths.registration in doors:
                    self.in_place.set()

                async def is_gone() -> None:
                    while all(each.is_in_place for each in servers):
                        await watcher.change({registry: ANY, directory: ANY}, may_hang=True)

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
                found="its server stopped by itself",
                do="nothing; the agent starts it again",
            )

    async def _can_serve(self) -> bool:
        """Return whether the kubelet's directory exists; create the driver's in it.

        Raises:
            OSError: the directory cannot be created.
            FilesSilent: its file system does not answer; a socket there would hang the agent.
        """
        registry, directory = self._paths.registry, self._paths.directory

        def look() -> bool:
            if is_there := os.path.isdir(registry):
                os.makedirs(directory, mode=_DIRECTORY_MODE, exist_ok=True)
            return is_there

        return await self._context.files.run(directory, "to serve the kubelet", look)

    def _fault(self, concern: str, line: str) -> None:
        self._context.fault(f"dra {concern}", one_line(line), part="dra")

    # RPCs

    def _registration(self) -> dict[str, Any]:
        async def info(_request: Any, _context: Any) -> registration.PluginInfo:
            return registration.PluginInfo(
                type="DRAPlugin",
                name=self._driver,
                endpoint=self._paths.endpoint,
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
        knows_shares = service.startswith(f"{_PACKAGES[0]}.")

        async def prepare(request: pb.NodePrepareResourcesRequest, call: Any) -> Any:
            def answer(active: ActiveDriver) -> Awaitable[Any]:
                return active.prepare(request, knows_shares=knows_shares)

            method, kind = f"/{service}/NodePrepareResources", pb.NodePrepareResourcesResponse
            return await self._answer(answer, method, kind, request, call)

        async def unprepare(request: pb.NodeUnprepareResourcesRequest, call: Any) -> Any:
            def answer(active: ActiveDriver) -> Awaitable[Any]:
                return active.unprepare(request)

            method, kind = f"/{service}/NodeUnprepareResources", pb.NodeUnprepareResourcesResponse
            return await self._answer(answer, method, kind, request, call)

        return {
            "NodePrepareResources": _unary(prepare, pb.NodePrepareResourcesRequest),
            "NodeUnprepareResources": _unary(unprepare, pb.NodeUnprepareResourcesRequest),
        }

    def _health(self, service: str) -> dict[str, Any]:
        name = "NodeWatchResources"
        handler = grpc.unary_stream_rpc_method_handler(
            partial(self._watch, f"/{service}/{name}"),
            request_deserializer=health_pb.NodeWatchResourcesRequest.FromString,
            response_serializer=serialize,
        )
        return {name: handler}

    async def _answer(
        self,
        answer: Callable[[ActiveDriver], Awaitable[Any]],
        method: str,
        kind: Any,
        request: Any,
        call: Any,
    ) -> Any:
        """Return the answer of the active instance; wait until there is one.

        Args:
            answer: produces the answer, if this instance is active.
            method: the full name of the method, for the relay.
            kind: the type of the response.
        """
        response = None
        while response is None:
            if (active := self._active) is not None:
                with suppress(DriverEnded):
                    return await answer(active)
            elif (relay := self._relay) is not None:
                try:
                    response = await relay.call(method, request, kind, call.time_remaining())
                except RelayRefused as error:
                    await call.abort(error.code, error.details)
            if response is None:
                await self._await_next(call)
        return response

    async def _await_next(self, call: Any) -> None:
        """Wait a moment for another active instance; end the call if this one ends."""
        if self._ends.is_set():
            await call.abort(grpc.StatusCode.UNAVAILABLE, "the agent ends")
        if self._active is None:
            with anyio.move_on_after(_RELAY_AGAIN):
                await self._changed.wait()

    async def _watch(
        self, method: str, request: health_pb.NodeWatchResourcesRequest, call: Any
    ) -> AsyncIterator[health_pb.NodeWatchResourcesResponse]:
        """Stream health from the active instance, whichever that is."""
        kind = health_pb.NodeWatchResourcesResponse
        while True:
            if (active := self._active) is not None:
                async with aclosing(active.watch()) as messages:
                    async for message in messages:
                        yield message
            elif (relay := self._relay) is not None:
                try:
                    async with aclosing(relay.stream(method, request, kind)) as messages:
                        async for message in messages:
                            yield message
                except RelayRefused as error:
                    await call.abort(error.code, error.details)
            await self._await_next(call)


def _unary(answer: Callable[[Any, Any], Awaitable[Any]], request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        answer, request_deserializer=request.FromString, response_serializer=serialize
    )


async def stand_by(tasks: anyio.abc.TaskGroup, context: Context, lock: NodeLock) -> Context:
    """Relay calls to another instance until this one has the lock of the node.

    Args:
        tasks: the task group that serves the sockets from now on.

    Returns:
        The context for the agent's services, with the server.
    """
    options = context.options
    paths = socket_paths(kubelet_root(context.config), options.dra_driver, options.pod_uid)
    server = DriverServer(context, Relay(paths.common))

    async def show() -> None:
        await server.in_place.wait()
        lock.show_pod(options.pod_uid)

    context.say("info", "waiting until another agent exits", process=lock.holder)
    tasks.start_soon(server.run)
    tasks.start_soon(show)
    await lock.wait()
    server.succeed()
    return replace(context, serving=server)
