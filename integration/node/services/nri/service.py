"""Register with the runtime as an NRI plugin and answer it, again after each of its restarts.

::

    dial ──▶ RegisterPlugin ──▶ Configure ──▶ Synchronize (in parts) ──▶ CreateContainer …
     ▲                                                                        │
     ╰──────────────── the socket appears again, or a pause ◀─── the end ◀────╯

Rules
- **NRI fails open**: without a plugin, or if it does not answer within two seconds, the runtime
  creates containers without their GPUs. So the service answers with an error before that time is
  over: an error refuses the container, and the kubelet tries again. The ledger finds containers
  that started without one of their devices, logs and counts them, and names them in an event on the
  pod.
- The runtime makes one call at a time for the whole node. An answer needs neither the driver nor
  another program; only the file system can be slow. So old records are removed in threads, and no
  answer waits for them.
- A pod whose handler injects by itself (``--nri-handlers``) is left to that handler.
- An engine calls a plugin only after synchronizing with it, and synchronizes only while no
  container is being created, stopped or removed. If that takes long, it is reported as a fault.
- The mask has only events that all supported releases know: an unknown one would fail the start.
- NRI reports a removed container with a separate call from 0.12 on, and with StateChange before.
- Only a runtime that runs as our own user is answered.

Source: github.com/containerd/nri pkg/adaptation and docs; :mod:`api.nri` has the connection.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from threading import Semaphore, Thread
from typing import Any, Final

import anyio

from api.errors import NvshimError, printable
from api.nri import Connection
from api.proto import nri_pb2 as pb
from api.ttrpc.client import dial
from api.ttrpc.service import Context as Call
from api.ttrpc.service import Service
from api.ttrpc.sockets import check_peer
from integration.agent_errors import NriEnded, NriUndecided, NriUnsynchronized
from integration.backoff import Backoff
from integration.detached import run_detached
from integration.node.service import Context, first_error
from integration.node.services.nri import records
from integration.node.services.nri.decision import NOTHING, Decision, decide
from integration.node.values.counters import FAILED, OK, REFUSED
from integration.watcher import Interest, Watcher

_FAULT: Final = "nri connection"
_SERVICES: Final = pb.DESCRIPTOR.services_by_name
_EVENTS: Final = (pb.CREATE_CONTAINER, pb.REMOVE_CONTAINER)
_MASK: Final = sum(1 << (event - 1) for event in _EVENTS)
_REGISTRATION: Final = 5.0  # seconds, the runtime's own limit
_SYNCHRONIZATION: Final = 10.0  # seconds after which missing synchronization is a fault
_ANSWER: Final = 1.0  # seconds; the runtime waits twice as long unless it is configured
_MARGIN: Final = 0.5  # fraction of the runtime's time limit
_MOST_THREADS: Final = 64
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0  # seconds


async def run(context: Context) -> None:
    """Serve the node's runtime as a plugin until cancelled."""
    directory, name = os.path.split(context.options.nri_socket)
    plugin, backoff = _Plugin(context), Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
    with Watcher(0) as watcher:
        while True:
            watcher.follow({directory: Interest(frozenset({name}), content=False)})
            started = time.monotonic()
            error = await plugin.serve()
            context.fault(_FAULT, str(error), level="warning")
            await watcher.wait(backoff.pause(time.monotonic() - started))


class _Plugin:
    """Answers the runtime."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._handlers = frozenset(context.options.nri_handlers)
        self._known: set[str] = set()
        self._synchronized = anyio.Event()
        self._tidying = Semaphore(_MOST_THREADS)
        self._deciding = Semaphore(_MOST_THREADS)
        self._service = Service(
            _SERVICES["Plugin"],
            {"CreateContainer": self._create},
            immediate={
                "Configure": lambda _, __: pb.ConfigureResponse(events=_MASK),
                "RemoveContainer": self._remove,
                "Shutdown": lambda _, __: pb.Empty(),
                "StateChange": self._change,
                "Synchronize": self._synchronize,
            },
        )

    async def serve(self) -> NvshimError:
        """Register with the runtime, and answer it until the connection ends; return why."""
        self._known, self._synchronized = set(), anyio.Event()
        try:
            await self._serve()
        except Exception as raised:
            error = first_error(raised)
            if not isinstance(error, NvshimError):
                raise
            return error
        asked = f"the connection to {self._context.options.nri_socket}"
        return NriEnded(asked, found="the engine ended it")

    async def _serve(self) -> None:
        options = self._context.options
        request = pb.RegisterPluginRequest(
            plugin_name=options.nri_name, plugin_idx=options.nri_index
        )
        runtime = _SERVICES["Runtime"].full_name
        with await dial(options.nri_socket, timeout=_REGISTRATION) as sock:
            peer = check_peer(sock)
            async with anyio.create_task_group() as tasks:
                connection = Connection(sock, peer, self._service, self._log, tasks)
                tasks.start_soon(connection.run)
                await connection.client.call(
                    runtime, "RegisterPlugin", request, pb.Empty, timeout=_REGISTRATION
                )
                tasks.start_soon(self._await_synchronization)
                await connection.client.wait_closed()
                tasks.cancel_scope.cancel()

    async def _await_synchronization(self) -> None:
        with anyio.move_on_after(_SYNCHRONIZATION):
            await self._synchronized.wait()
            return
        asked = f"the connection to {self._context.options.nri_socket}"
        error = NriUnsynchronized(asked, found=f"not synchronized in {_SYNCHRONIZATION:g} s")
        self._context.fault(_FAULT, str(error), level="warning")

    def _synchronize(self, _: Call, request: pb.SynchronizeRequest) -> pb.SynchronizeResponse:
        self._known.update(container.id for container in request.containers)
        if not request.more:
            self._tidy(records.reconcile, self._known)
            self._synchronized.set()
            self._context.fault(_FAULT, "")
            self._context.say("info", "registered by NRI", containers=len(self._known))
        return pb.SynchronizeResponse(more=request.more)

    async def _create(
        self, call: Call, request: pb.CreateContainerRequest
    ) -> pb.CreateContainerResponse:
        pod, container = request.pod, request.container
        title = printable(f"{pod.namespace}/{pod.name}/{container.name}")
        counters, say = self._context.state.counters, self._context.say
        try:
            decision = await self._decide(call, pod, container)
        except Exception as error:
            is_ours = isinstance(error, NvshimError)
            counters.nri_answered(REFUSED if is_ours else FAILED)
            say("error", "NRI refuses a container", container=title, why=str(error))
            raise
        if decision.denied:
            say("warning", "NRI denied a request", container=title, why=decision.denied)
        if decision.adjustment is None:
            return pb.CreateContainerResponse()
        counters.nri_answered(OK)
        say("info", "GPUs given by NRI", container=title, devices=",".join(decision.devices))
        return pb.CreateContainerResponse(adjust=decision.adjustment)

    async def _decide(self, call: Call, pod: pb.PodSandbox, container: pb.Container) -> Decision:
        if pod.runtime_handler in self._handlers:
            return NOTHING
        context = self._context

        def forget(late: Decision) -> None:
            if late.adjustment is not None:
                self._tidy(records.remove, container.id)

        limit = min(_ANSWER, call.timeout * _MARGIN if call.timeout else _ANSWER)
        inventory = context.state.node.value.inventory
        asked = f"the GPUs of container {container.name}"

        def run() -> Decision:
            if not self._deciding.acquire(blocking=False):
                raise NriUndecided(asked, found="earlier decisions have not ended, either")
            try:
                return decide(pod, container, context.config, inventory)
            finally:
                self._deciding.release()

        try:
            with anyio.fail_after(limit):
                return await run_detached(run, drop=forget)
        except TimeoutError:
            raise NriUndecided(asked, found=f"not decided in {limit:g} s") from None

    def _remove(self, _: Call, request: pb.RemoveContainerRequest) -> pb.Empty:
        self._tidy(records.remove, request.container.id)
        return pb.Empty()

    def _change(self, _: Call, request: pb.StateChangeEvent) -> pb.Empty:
        if request.event == pb.REMOVE_CONTAINER:
            self._tidy(records.remove, request.container.id)
        return pb.Empty()

    def _tidy(self, remove: Callable[[str, Any], None], which: str | set[str]) -> None:
        """Remove records in a thread: the runtime would drop a plugin that waits for them."""

        def run() -> None:
            try:
                remove(self._context.config.state, which)
            finally:
                self._tidying.release()

        # If so many hang, or none can be started, the rest is removed at the next synchronization.
        if self._tidying.acquire(blocking=False):
            try:
                Thread(target=run, name="nri records", daemon=True).start()
            except RuntimeError:
                self._tidying.release()

    def _log(self, event: str, fields: object) -> None:
        self._context.say("error", event, nri=str(fields))
