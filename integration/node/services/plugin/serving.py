"""Serve the plugins of all resources, and keep them registered with the kubelet.

Each resource has a task of its own, so that no resource waits for another:

======================================  =====================================================
event                                   action
======================================  =====================================================
new resource                            start its server and register it
resource changed                        send the new list to its watchers
resource gone                           send an empty list to its watchers, stop its server
socket gone (a starting kubelet         start a new server at once, while the old one shuts down
removes it)
server crashed                          start a new server after a pause
new kubelet socket                      register every resource there once, and cancel what is
                                        under way with the previous kubelet
kubelet dropped its watch               register the resource again; pause if it happens
                                        repeatedly
kubelet refused or did not answer       report why, and register again after a pause
======================================  =====================================================
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import anyio
import anyio.abc
import anyio.lowlevel

from integration.agent_errors import (
    KubeletRefused,
    KubeletUnreachable,
    PluginFailed,
    ServingError,
)
from integration.backoff import Backoff
from integration.kubelet.registration import register
from integration.kubelet.sockets import Identity, socket_identity, socket_name
from integration.node.service import Context
from integration.node.services.plugin.server import Answers, Server
from integration.node.values.counters import FAILED, OK, REFUSED
from integration.node.values.resources import Resource
from integration.watcher import first_of


class Serving:
    """All plugins of the node.

    Args:
        fault: called with a resource's name and what is wrong with it; "" if nothing is wrong.
    """

    def __init__(
        self,
        context: Context,
        tasks: anyio.abc.TaskGroup,
        answers: Answers,
        fault: Callable[[str, str], None],
    ) -> None:
        self.context = context
        self.tasks = tasks
        self.answers = answers
        self.fault = fault
        self.kubelet = context.options.kubelet_socket
        self._plugins: dict[str, _Plugin] = {}
        self._looked = anyio.Event()

    @property
    def identities(self) -> set[Identity]:
        """The identities of our own sockets."""
        servers = (each.server for each in self._plugins.values() if each.server is not None)
        return {server.identity for server in servers if server.identity is not None}

    def serve(self, resources: Iterable[Resource]) -> None:
        """Serve exactly those of the resources that have devices."""
        wanted = {each.name: each for each in resources if each.devices}
        for name in self._plugins.keys() - wanted.keys():
            self._plugins.pop(name).stop(is_gone=True)
        self.update(wanted.values())
        for name in wanted.keys() - self._plugins.keys():
            plugin = self._plugins[name] = _Plugin(self, wanted[name])
            self.tasks.start_soon(plugin.run)
        self.look()

    def update(self, resources: Iterable[Resource]) -> None:
        """Send the new lists of the served resources to their watchers."""
        for each in resources:
            if each.devices and each.name in self._plugins:
                self._plugins[each.name].update(each)

    def stop(self) -> None:
        """Stop all plugins. The kubelet treats the devices as unhealthy until they return."""
        while self._plugins:
            self._plugins.popitem()[1].stop()

    def look(self) -> None:
        """Check the sockets again: some may be gone or replaced."""
        self._looked.set()
        self._looked = anyio.Event()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until a condition on the sockets holds; check it after each :meth:`look`."""
        while not is_so():
            await self._looked.wait()


class _Plugin:
    """The plugin of one resource."""

    def __init__(self, serving: Serving, resource: Resource) -> None:
        self.server: Server | None = None
        self._serving = serving
        self._say = serving.context.say
        self._counters = serving.context.state.counters
        self._resource = resource
        self._name = resource.name
        self._fault = partial(serving.fault, resource.name)
        self._scope = anyio.CancelScope()

    def update(self, resource: Resource) -> None:
        """Send the new list to the watchers."""
        self._resource = resource
        if self.server is not None:
            self.server.update(resource)

    def stop(self, *, is_gone: bool = False) -> None:
        """Stop; the socket is gone when this returns.

        Args:
            is_gone: whether the resource no longer exists; the kubelet then receives an empty list.
        """
        if is_gone:
            self.update(replace(self._resource, devices=()))
            self._say("info", "stopped serving", resource=self._name)
        if self.server is not None:
            self.server.withdraw()
        self._scope.cancel()
        self._fault("")

    async def run(self) -> None:
        """Serve until cancelled, with one server after the other."""
        backoff = Backoff()
        path = os.path.join(os.path.dirname(self._serving.kubelet), socket_name(self._name))
        with self._scope:
            while True:
                started = time.monotonic()
                server = Server(path, self._resource, self._serving.answers, self._serving.context)
                try:
                    await self._serve(server)
                except (ServingError, OSError) as error:
                    await anyio.lowlevel.checkpoint()  # report no fault once cancelled
                    self._fault(str(error))
                    await anyio.sleep(backoff.pause(time.monotonic() - started))

    async def _serve(self, server: Server) -> None:
        """Serve until the server loses its socket.

        Raises:
            ServingError: the server cannot start, or it crashed.
            OSError: the server cannot start.
        """
        await server.start()
        self.server = server
        server.update(self._resource)  # it may have changed in the meantime
        self._fault("")
        self._say("info", "serving", resource=self._name, socket=server.path)
        try:
            which, _ = await first_of(
                server.crash,
                partial(self._serving.until, lambda: not server.is_in_place),
                partial(self._keep_known, server),
            )
        finally:
            self.server = None
            # A restarted kubelet needs the new server at once; the old one shuts down meanwhile.
            self._serving.tasks.start_soon(server.end)
        if which == 0:
            raise PluginFailed(
                f"to serve {self._name}",
                found="its server stopped by itself",
                do="nothing; the agent starts it again",
            )

    async def _keep_known(self, server: Server) -> None:
        """Stay registered with the current kubelet."""
        while True:
            kubelet = socket_identity(self._serving.kubelet)
            keep = partial(self._stay_registered, server, kubelet)
            await first_of(
                partial(self._serving.until, partial(self._is_another, kubelet)),
                anyio.sleep_forever if kubelet is None else keep,
            )

    def _is_another(self, kubelet: object) -> bool:
        return socket_identity(self._serving.kubelet) != kubelet

    async def _stay_registered(self, server: Server, kubelet: object) -> None:
        """Register with one kubelet, and again whenever it drops its watch."""
        failed, lost = Backoff(), Backoff(first=0.0)
        while True:
            started = time.monotonic()
            endpoint = os.path.basename(server.path)
            server.lost = anyio.Event()  # the kubelet may watch and leave before it answers
            try:
                await register(self._serving.kubelet, kubelet, endpoint, self._name)
            except (KubeletRefused, KubeletUnreachable) as error:
                refused = isinstance(error, KubeletRefused)
                self._counters.registered(self._name, REFUSED if refused else FAILED)
                self._fault(str(error))
                await anyio.sleep(failed.pause())
            else:
                self._counters.registered(self._name, OK)
                self._fault("")
                self._say("info", "registered", resource=self._name)
                failed = Backoff()
                await server.lost.wait()
                await anyio.sleep(lost.pause(time.monotonic() - started))
