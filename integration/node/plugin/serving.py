"""The plugins of all resources, and keeping them known to the kubelet.

======================================  =====================================================
seen                                    done
======================================  =====================================================
a resource that nobody serves           its server begins, and is registered
a resource that has changed             its watchers are told
a resource that is no more              its watchers are told that nothing is left; it ends
a socket that is gone (a kubelet that   its server begins anew
began has removed it), or a server
that has crashed
a kubelet's socket that is another      every resource is registered with it, once, and before
                                        anything else is done; what was under way with the one
                                        before is given up
a kubelet that listens no more          the resource is registered again, after a while
a kubelet that says no, or nothing      likewise; it is said why
======================================  =====================================================

What is tried again is tried after one second, and then each time after twice as long, up to thirty.
No resource waits for another.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import anyio
import anyio.abc

from integration.node.metrics.counters import FAILED, OK, REFUSED
from integration.node.plugin import kubelet as kubelets
from integration.node.plugin.server import Answers, Server
from integration.node.plugin.serving_errors import (
    KubeletRefused,
    KubeletUnreachable,
    PluginFailed,
    ServingError,
)
from integration.node.plugin.sockets import identity_of, socket_name
from integration.node.plugin.watching import socket_identity

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from api.proto import deviceplugin_pb2 as pb
    from integration.node.parts import Context
    from integration.node.plugin.sockets import Identity
    from integration.node.plugin.values import Resource

__all__ = ["Serving", "Work"]

_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0
_SETTLED: Final = 60.0


@dataclass(frozen=True, slots=True)
class Work:
    """What the plugins do not do themselves.

    Attributes:
        allocate: the answer for ids of a resource, by its name.
        prefer: which of the available ids of a resource, with these among them, and how many.
        wake: have :meth:`Serving.round` called soon.
        fault: what is wrong with a resource, by its name; "" if nothing is.
    """

    allocate: Callable[[str, Sequence[str]], Awaitable[pb.ContainerAllocateResponse]]
    prefer: Callable[[str, Sequence[str], Sequence[str], int], Awaitable[Sequence[str]]]
    wake: Callable[[], None]
    fault: Callable[[str, str], None]


@dataclass(slots=True)
class _Attempt:
    """To make a resource known to a kubelet.

    Attributes:
        kubelet: to which, by its socket.
        scope: of the task that does it.
    """

    kubelet: object
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


@dataclass(slots=True)
class _Served:
    """A resource that is served.

    Attributes:
        server: of it.
        scope: of the task that waits for it to crash.
        registered: the kubelet that knows of it, by its socket; None for none.
        since: when it was registered.
        tried: the kubelet that was last tried.
        failures: how often in a row that was in vain.
        again_at: when it may be tried again; of the monotonic clock.
        attempt: to register it, which is under way.
        crashed: whether its listener is gone.
    """

    server: Server
    scope: anyio.CancelScope
    registered: object = None
    since: float = 0.0
    tried: object = None
    failures: int = 0
    again_at: float = 0.0
    attempt: _Attempt | None = None
    crashed: bool = False


@dataclass(slots=True)
class _Failed:
    """A resource whose server could not begin."""

    failures: int
    again_at: float


class Serving:
    """All plugins of the node.

    Args:
        context: of the agent.
        tasks: where what they do goes on.
        work: what they do not do themselves.
    """

    def __init__(self, context: Context, tasks: anyio.abc.TaskGroup, work: Work) -> None:
        self._context = context
        self._tasks = tasks
        self._work = work
        self._kubelet = context.options.kubelet_socket
        self._served: dict[str, _Served] = {}
        self._failed: dict[str, _Failed] = {}
        self._one = anyio.Lock()
        self._ended = False

    @property
    def identities(self) -> set[Identity]:
        """The sockets that are ours."""
        return {s.server.identity for s in self._served.values() if s.server.identity is not None}

    async def round(self, resources: Iterable[Resource]) -> None:
        """Do what the table above says.

        Args:
            resources: what there is.
        """
        async with self._one:
            if not self._ended:
                await self._serve({each.name: each for each in resources if each.devices})

    async def renew(self) -> None:
        """Serve what was served last to a kubelet that has begun, and that removed all sockets."""
        async with self._one:
            for name, served in list(self._served.items()):
                # What somebody else has put in its place is not looked at here.
                if served.server.is_in_place or identity_of(served.server.path) is None:
                    await self._serve_one(name, served.server.resource)

    async def _serve(self, wanted: Mapping[str, Resource]) -> None:
        for name in [name for name in self._served if name not in wanted]:
            await self._retire(name)
        for name, resource in wanted.items():
            await self._serve_one(name, resource)
        for name in [name for name in self._failed if name not in wanted]:
            del self._failed[name]
            self._work.fault(name, "")

    async def _serve_one(self, name: str, resource: Resource) -> None:
        served = self._served.get(name)
        if served is not None and served.crashed:
            self._put_off(name, served.failures)
            await self._stop(name)
            served = None
        elif served is not None and not served.server.is_in_place:
            # A kubelet has begun, and waits for nobody; who still talks to this one can wait.
            self._tasks.start_soon(self._let_go(name).server.end)
            served = None
        if served is None:
            await self._begin(name, resource)
        else:
            served.server.tell(resource)
        self._make_known(name)

    async def end(self) -> None:
        """Serve nothing any more. The kubelet takes the devices for unhealthy until we are back."""
        with anyio.CancelScope(shield=True):
            async with self._one:
                self._ended = True
                for name in list(self._served):
                    await self._stop(name)
        self._failed.clear()

    # Servers

    async def _begin(self, name: str, resource: Resource) -> None:
        failed = self._failed.get(name)
        if failed is not None and time.monotonic() < failed.again_at:
            return
        path = os.path.join(os.path.dirname(self._kubelet), socket_name(name))
        server = Server(path, resource, self._answers(name))
        try:
            await server.begin()
        except (ServingError, OSError) as error:
            self._put_off(name, failed.failures if failed is not None else 0)
            self._work.fault(name, str(error))
            return
        self._failed.pop(name, None)
        served = _Served(server, anyio.CancelScope())
        self._served[name] = served
        self._tasks.start_soon(self._await_crash, name, served)
        self._work.fault(name, "")
        self._context.say("info", "serves", resource=name, socket=path)

    async def _await_crash(self, name: str, served: _Served) -> None:
        with served.scope:
            await served.server.crash()
            served.crashed = True
            self._work.fault(
                name,
                str(
                    PluginFailed(
                        f"to serve {name}",
                        found="its server has ended by itself",
                        do="it is begun again",
                    )
                ),
            )
            self._work.wake()

    async def _retire(self, name: str) -> None:
        """End for good: the kubelet is told that nothing is left."""
        served = self._served[name]
        served.server.tell(replace(served.server.resource, devices=()))
        await self._stop(name)
        self._context.say("info", "serves no more", resource=name)

    async def _stop(self, name: str) -> None:
        await self._let_go(name).server.end()
        self._work.fault(name, "")

    def _let_go(self, name: str) -> _Served:
        """Have nothing to do any more with what is served."""
        served = self._served.pop(name)
        served.scope.cancel()
        if served.attempt is not None:
            served.attempt.scope.cancel()
        return served

    def _put_off(self, name: str, failures: int) -> None:
        pause = _pause(failures)
        self._failed[name] = _Failed(failures + 1, time.monotonic() + pause)
        self._tasks.start_soon(self._wake_after, pause)

    async def _wake_after(self, seconds: float) -> None:
        await anyio.sleep(seconds)
        self._work.wake()

    def _answers(self, name: str) -> Answers:
        async def allocate(ids: Sequence[str]) -> pb.ContainerAllocateResponse:
            return await self._work.allocate(name, ids)

        async def prefer(
            available: Sequence[str], required: Sequence[str], size: int
        ) -> Sequence[str]:
            return await self._work.prefer(name, available, required, size)

        def lost() -> None:
            served = self._served.get(name)
            if served is not None and served.registered is not None:
                settled = time.monotonic() - served.since > _SETTLED
                self._try_later(served, 0 if settled else served.failures)

        return Answers(
            allocate=allocate,
            prefer=prefer,
            told=lambda: self._context.board.counters.updated(name),
            lost=lost,
            failed=lambda line, trace: self._context.say("error", line, trace=trace),
        )

    # The kubelet

    def _make_known(self, name: str) -> None:
        """Register a resource, if that is needed, and not too soon after it was in vain."""
        served, kubelet = self._served.get(name), socket_identity(self._kubelet)
        if served is None or kubelet is None or served.registered == kubelet:
            return
        if served.attempt is not None:
            if served.attempt.kubelet == kubelet:
                return
            served.attempt.scope.cancel()
        if served.tried != kubelet:
            served.tried = kubelet
            served.failures, served.again_at = 0, 0.0
        if time.monotonic() < served.again_at:
            return
        served.attempt = _Attempt(kubelet)
        self._tasks.start_soon(self._register, name, served, served.attempt)

    async def _register(self, name: str, served: _Served, attempt: _Attempt) -> None:
        counters = self._context.board.counters
        endpoint = os.path.basename(served.server.path)

        def reached(kubelet: object) -> None:
            attempt.kubelet = kubelet

        try:
            with attempt.scope:
                await kubelets.register(self._kubelet, endpoint, name, reached=reached)
                counters.registered(name, OK)
                served.registered, served.since = attempt.kubelet, time.monotonic()
                self._work.fault(name, "")
                self._context.say("info", "registered", resource=name)
        except (KubeletRefused, KubeletUnreachable) as error:
            counters.registered(name, REFUSED if isinstance(error, KubeletRefused) else FAILED)
            self._work.fault(name, str(error))
            self._try_later(served, served.failures)
        finally:
            if served.attempt is attempt:
                served.attempt = None
            self._work.wake()

    def _try_later(self, served: _Served, failures: int) -> None:
        pause = _pause(failures)
        served.registered = None
        served.failures, served.again_at = failures + 1, time.monotonic() + pause
        self._tasks.start_soon(self._wake_after, pause)


def _pause(failures: int) -> float:
    return float(min(_FIRST_PAUSE * 2 ** min(failures, 10), _LONGEST_PAUSE))
