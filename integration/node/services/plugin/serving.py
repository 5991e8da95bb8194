"""The plugins of all resources, and keeping them known to the kubelet.

Each resource has a task of its own, so that no resource waits for another:

======================================  =====================================================
seen                                    done
======================================  =====================================================
a resource that nobody serves           its server begins, and is registered
a resource that has changed             its watchers are told
a resource that is no more              its watchers are told that nothing is left; it ends
a socket that is gone (a kubelet that   its server begins anew, without waiting for the end of
began has removed it)                   the one before
a server that has crashed               it begins anew, after a while
a kubelet's socket that is another      every resource is registered with it, once; what was
                                        under way with the one before is given up
a kubelet that listens no more          the resource is registered again; if that is so again and
                                        again, after a while
a kubelet that says no, or nothing      likewise; it is said why
======================================  =====================================================
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

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
from integration.node.services.plugin.server import Answers, Server
from integration.node.values.counters import FAILED, OK, REFUSED
from integration.watcher import first_of

if TYPE_CHECKING:
    from integration.node.service import Context
    from integration.node.values.resources import Resource


class Serving:
    """All plugins of the node.

    Args:
        fault: takes what is wrong with a resource, by its name; "" if nothing is.
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
        """The sockets that are ours."""
        servers = (each.server for each in self._plugins.values() if each.server is not None)
        return {server.identity for server in servers if server.identity is not None}

    def serve(self, resources: Iterable[Resource]) -> None:
        """Serve these resources from now on, as far as they have devices, and no others."""
        wanted = {each.name: each for each in resources if each.devices}
        for name in self._plugins.keys() - wanted.keys():
            self._plugins.pop(name).end(is_gone=True)
        self.tell(wanted.values())
        for name in wanted.keys() - self._plugins.keys():
            plugin = self._plugins[name] = _Plugin(self, wanted[name])
            self.tasks.start_soon(plugin.run)
        self.look()

    def tell(self, resources: Iterable[Resource]) -> None:
        """Tell whoever watches what there is now of the resources that are served."""
        for each in resources:
            if each.devices and each.name in self._plugins:
                self._plugins[each.name].tell(each)

    def end(self) -> None:
        """Serve nothing any more. The kubelet takes the devices for unhealthy until we are back."""
        while self._plugins:
            self._plugins.popitem()[1].end()

    def look(self) -> None:
        """Look which sockets there are: some of them may be gone, or be others."""
        self._looked.set()
        self._looked = anyio.Event()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so of the sockets that there are."""
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

    def tell(self, resource: Resource) -> None:
        """Tell whoever watches what there is now."""
        self._resource = resource
        if self.server is not None:
            self.server.tell(resource)

    def end(self, *, is_gone: bool = False) -> None:
        """End; the socket is gone when this returns.

        Args:
            is_gone: so is the resource, and the kubelet is told that nothing is left of it.
        """
        if is_gone:
            self.tell(replace(self._resource, devices=()))
            self._say("info", "serves no more", resource=self._name)
        if self.server is not None:
            self.server.withdraw()
        self._scope.cancel()
        self._fault("")

    async def run(self) -> None:
        """Serve until the end, with one server after the other."""
        backoff = Backoff()
        path = os.path.join(os.path.dirname(self._serving.kubelet), socket_name(self._name))
        with self._scope:
            while True:
                begun = time.monotonic()
                server = Server(path, self._resource, self._serving.answers, self._serving.context)
                try:
                    await self._serve(server)
                except (ServingError, OSError) as error:
                    await anyio.lowlevel.checkpoint()  # one that is to end has no faults
                    self._fault(str(error))
                    await anyio.sleep(backoff.pause(time.monotonic() - begun))

    async def _serve(self, server: Server) -> None:
        """Serve until the server has lost its socket.

        Raises:
            ServingError: it cannot begin, or it has crashed.
            OSError: it cannot begin.
        """
        await server.begin()
        self.server = server
        server.tell(self._resource)  # it may have changed meanwhile
        self._fault("")
        self._say("info", "serves", resource=self._name, socket=server.path)
        try:
            which, _ = await first_of(
                server.crash,
                partial(self._serving.until, lambda: not server.is_in_place),
                partial(self._keep_known, server),
            )
        finally:
            self.server = None
            # A kubelet that has begun waits for nobody; who still talks to this one can wait.
            self._serving.tasks.start_soon(server.end)
        if which == 0:
            raise PluginFailed(
                f"to serve {self._name}",
                found="its server has ended by itself",
                do="it is begun again",
            )

    async def _keep_known(self, server: Server) -> None:
        """Be known to whatever kubelet there is."""
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
        """Register with one kubelet, and again whenever that listens no more."""
        failed, lost = Backoff(), Backoff(first=0.0)
        while True:
            begun = time.monotonic()
            endpoint = os.path.basename(server.path)
            server.lost = anyio.Event()  # it may listen, and go, before it has answered
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
                await anyio.sleep(lost.pause(time.monotonic() - begun))
