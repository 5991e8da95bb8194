"""What the kubelet calls: registration, NodePrepareResources and its opposite, and health.

::

    KUBELET/plugins_registry/DRIVER-reg.sock   GetInfo, NotifyRegistrationStatus
    KUBELET/plugins/DRIVER/dra.sock            NodePrepareResources, NodeUnprepareResources, and
                                               NodeWatchResources

Rules
- The socket of the driver is there before that of its registration, and goes after it. A kubelet
  watches for the latter; one that restarts looks for it, so there is nothing to be done then.
- Sockets that are gone are made anew. A kubelet that is not there is waited for.
- Each version is served in both forms that kubelets call, v1 first: they take the first they know.
- Of each claim that is asked about something is said, a refusal in the words of its error: the
  kubelet puts it into an event of the pod.
- What is begun for a claim is not given up because the kubelet waits no more. It asks again, and
  the answer is there. So what is asked for one claim is done in the order in which it was asked:
  else what the kubelet has given up would be prepared after it was taken back, and nobody would
  take it back any more.
- Health is told whole at each change, and at least every ten seconds: the kubelet forgets a device
  that it has not heard of for thirty.

Source: Kubernetes kubelet pkg/kubelet/cm/dra/plugin, pkg/kubelet/pluginmanager.
"""

from __future__ import annotations

import os
import time
import traceback
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import anyio
import anyio.abc
import grpc  # type: ignore[import-untyped] # it ships no types

from api.errors import NvshimError, one_line
from api.proto import dra_health_pb2 as health_pb
from api.proto import dra_pb2 as pb
from api.proto import pluginregistration_pb2 as registration
from hooks.node.kubelet import kubelet_root
from integration.node.backoff import Backoff
from integration.node.dra.claims import Reference
from integration.node.errors import DraFailed, PluginFailed, ServingError
from integration.node.socket_server import SocketServer, serialize
from integration.node.watcher import ANY, Watcher, first_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from integration.node.components import Context
    from integration.node.dra.values import Claim, Health

__all__ = ["Answers", "Serving", "answer_of_claim"]

_PACKAGES: Final = ("k8s.io.kubelet.pkg.apis.dra.v1", "k8s.io.kubelet.pkg.apis.dra.v1beta1")
_HEALTH: Final = ("v1", "v1alpha1")
VERSIONS: Final = (
    "v1.DRAPlugin",
    "v1beta1.DRAPlugin",
    *(f"{version}.DRAResourceHealth" for version in _HEALTH),
)

_TOLD_AGAIN: Final = 10.0
_FORGOTTEN_AFTER: Final = 30
_LONGEST_MESSAGE: Final = 1024
_DIRECTORY_MODE: Final = 0o750


class Answers(Protocol):
    """What the kubelet is answered."""

    async def prepare(self, reference: Reference) -> Claim:
        """Have a claim's devices be ready for its pods."""

    async def unprepare(self, reference: Reference) -> None:
        """Take back what was prepared; nothing if nothing was."""

    def health(self) -> Iterable[Health]:
        """What is thought of each device now."""

    def cdi_names(self, claim: Claim) -> Iterable[str]:
        """The CDI names of a claim's devices, in their order."""


class Serving:
    """The driver's sockets.

    Args:
        tasks: where what is begun goes on.
        driver: its name.
        fault: takes what is wrong with a concern of ours; "" if nothing is any more.
    """

    def __init__(
        self,
        context: Context,
        tasks: anyio.abc.TaskGroup,
        driver: str,
        answers: Answers,
        fault: Callable[[str, str], None],
    ) -> None:
        root = kubelet_root(context.config)
        self._context = context
        self._tasks = tasks
        self._driver = driver
        self._answers = answers
        self._fault = fault
        self._registry = os.path.join(root, "plugins_registry")
        self._directory = os.path.join(root, "plugins", driver)
        self._turns: dict[str, anyio.Lock] = {}

    async def run(self) -> None:
        """Serve until cancelled."""
        backoff = Backoff()
        while True:
            begun = time.monotonic()
            try:
                await self._serve()
            except (ServingError, OSError) as error:
                self._fault("kubelet", str(error))
                await anyio.sleep(backoff.pause(time.monotonic() - begun))

    async def _serve(self) -> None:
        """Serve until a socket is gone.

        Raises:
            ServingError: it cannot begin, or a server has crashed.
            OSError: it cannot begin.
        """
        with Watcher(quiet=0) as watcher:
            while not _is_there(self._registry):
                await watcher.change({self._registry: ANY})
            os.makedirs(self._directory, mode=_DIRECTORY_MODE, exist_ok=True)
            ours = SocketServer(os.path.join(self._directory, "dra.sock"))
            known = SocketServer(os.path.join(self._registry, f"{self._driver}-reg.sock"))
            try:
                await ours.listen(self._services())
                await known.listen({"pluginregistration.Registration": self._registration(ours)})
                self._fault("kubelet", "")
                self._context.say("info", "serves", driver=self._driver, socket=ours.path)

                async def is_gone() -> None:
                    while ours.is_in_place and known.is_in_place:
                        await watcher.change({self._registry: ANY, self._directory: ANY})

                which, _ = await first_of(ours.crash, known.crash, is_gone)
            finally:
                await known.end()
                await ours.end()
        if which < 2:  # noqa: PLR2004 - one of the two servers
            raise PluginFailed(
                f"to serve {self._driver}",
                found="its server has ended by itself",
                do="it is begun again",
            )

    # What a kubelet calls

    def _registration(self, ours: SocketServer) -> dict[str, Any]:
        async def info(_request: Any, _context: Any) -> registration.PluginInfo:
            return registration.PluginInfo(
                type="DRAPlugin",
                name=self._driver,
                endpoint=ours.path,
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
            "GetInfo": _unary(info, registration.InfoRequest),
            "NotifyRegistrationStatus": _unary(status, registration.RegistrationStatus),
        }

    def _services(self) -> dict[str, dict[str, Any]]:
        health = {
            "NodeWatchResources": grpc.unary_stream_rpc_method_handler(
                self._watch,
                request_deserializer=health_pb.NodeWatchResourcesRequest.FromString,
                response_serializer=serialize,
            )
        }
        return {
            **{f"{package}.DRAPlugin": self._plugin(package) for package in _PACKAGES},
            **{f"{version}.DRAResourceHealth": health for version in _HEALTH},
        }

    def _plugin(self, package: str) -> dict[str, Any]:
        prepare = partial(self._prepare, knows_shares=package == _PACKAGES[0])
        return {
            "NodePrepareResources": _unary(prepare, pb.NodePrepareResourcesRequest),
            "NodeUnprepareResources": _unary(self._unprepare, pb.NodeUnprepareResourcesRequest),
        }

    async def _prepare(
        self, request: pb.NodePrepareResourcesRequest, _context: Any, *, knows_shares: bool
    ) -> pb.NodePrepareResourcesResponse:
        answer = pb.NodePrepareResourcesResponse()
        for each in request.claims:
            reference = Reference(each.namespace, each.uid, each.name)
            claim, error = await self._done("prepare", self._answers.prepare, reference)
            said = pb.NodePrepareResourceResponse(error=error)
            if claim is not None:
                names = self._answers.cdi_names(claim)
                said = answer_of_claim(claim, names, knows_shares=knows_shares)
            answer.claims[each.uid].CopyFrom(said)
        return answer

    async def _unprepare(
        self, request: pb.NodeUnprepareResourcesRequest, _context: Any
    ) -> pb.NodeUnprepareResourcesResponse:
        answer = pb.NodeUnprepareResourcesResponse()
        for each in request.claims:
            reference = Reference(each.namespace, each.uid, each.name)
            _, error = await self._done("unprepare", self._answers.unprepare, reference)
            answer.claims[each.uid].error = error
        return answer

    async def _done(
        self, what: str, do: Callable[[Reference], Awaitable[Any]], reference: Reference
    ) -> tuple[Any, str]:
        """What has come of something that is done in a task of its own, and why nothing has."""
        done, found = anyio.Event(), [(None, "the agent ends")]
        title = f"{reference.namespace}/{reference.name}"

        async def work() -> None:
            try:
                async with self._turn(reference.uid):
                    found[0] = await do(reference), ""
            except NvshimError as error:
                found[0] = None, one_line(str(error))
                self._context.say("warning", str(error), claim=title)
            except Exception as error:  # noqa: BLE001 - the server goes on, whatever it is
                failed = DraFailed(
                    f"to {what} the claim {title}", found=f"{type(error).__name__}: {error}"
                )
                found[0] = None, one_line(str(failed))
                self._context.say("error", str(failed), trace=traceback.format_exc())
            else:
                self._context.say("info", f"{what}d", claim=title, uid=reference.uid)
            finally:
                done.set()

        self._tasks.start_soon(work)
        await done.wait()
        return found[0]

    @asynccontextmanager
    async def _turn(self, uid: str) -> AsyncIterator[None]:
        """Wait until what was asked before for a claim is done."""
        turns = self._turns.setdefault(uid, anyio.Lock())
        try:
            async with turns:
                yield
        finally:
            if not turns.locked():  # it is nobody else's turn
                self._turns.pop(uid, None)

    async def _watch(
        self, _request: health_pb.NodeWatchResourcesRequest, _context: Any
    ) -> AsyncIterator[health_pb.NodeWatchResourcesResponse]:
        board = self._context.board
        while True:
            version = board.version("dra")
            now = int(time.time())
            told = health_pb.NodeWatchResourcesResponse()
            for each in self._answers.health():
                told.devices.add(
                    device=health_pb.DeviceIdentifier(pool_name=each.pool, device_name=each.name),
                    health=health_pb.HEALTHY if each.is_healthy else health_pb.UNHEALTHY,
                    last_updated_time=now,
                    health_check_timeout_seconds=_FORGOTTEN_AFTER,
                    message=each.message[:_LONGEST_MESSAGE],
                )
            yield told
            await board.change("dra", since=version, timeout=_TOLD_AGAIN)


def answer_of_claim(
    claim: Claim, cdi_names: Iterable[str], *, knows_shares: bool = True
) -> pb.NodePrepareResourceResponse:
    """What the kubelet is told of a claim that was prepared.

    Args:
        knows_shares: whether the version of the API has shares.
    """
    answer = pb.NodePrepareResourceResponse()
    for device, name in zip(claim.devices, cdi_names, strict=True):
        answer.devices.add(
            request_names=[device.request],
            pool_name=device.pool,
            device_name=device.device,
            cdi_device_ids=[name],
            share_id=device.share if device.share and knows_shares else None,
        )
    return answer


def _is_there(directory: str) -> bool:
    return os.path.isdir(directory)


def _unary(answer: Callable[[Any, Any], Awaitable[Any]], request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        answer, request_deserializer=request.FromString, response_serializer=serialize
    )
