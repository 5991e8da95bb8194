"""The driver's RPCs: answered by the active driver of this agent, or relayed to another instance.

Rules
- Every claim of a call gets an answer; an error has the text that the kubelet puts into an event of
  the pod.
- The claims of a call are handled at the same time: the kubelet allows 45 seconds for all together.
- Work on a claim continues if the kubelet stops waiting. It will call again, and then the answer is
  ready. Work also continues when the agent exits, for at most :data:`TO_FINISH` seconds. After that
  the call gets no answer, and the instance that relayed it calls again.
- If the work takes nearly as long as the kubelet waits, the answer is an error that says so, and
  the work continues: MPS daemons, nvidia-smi on several GPUs and NVML may all be slow for one
  claim.
- A relayed call has its own connection, since another instance may be active for the next call. If
  the active instance exited before it answered, the call is repeated with the next active one;
  preparing and unpreparing may safely be repeated.
- Health streams send all devices at each change, and every ten seconds, because the kubelet drops a
  device that was not reported for thirty seconds.

Source: Kubernetes kubelet pkg/kubelet/cm/dra; grpc.aio.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import anyio
import anyio.abc
import grpc  # type: ignore[import-untyped] # it ships no types
import grpc.aio  # type: ignore[import-untyped] # it ships no types

from api.errors import NvshimError, one_line
from api.proto import dra_health_pb2 as health_pb
from api.proto import dra_pb2 as pb
from integration.agent_errors import ClaimUnfinished, DraFailed
from integration.grpc_anyio import answer_of
from integration.kubelet.grpc_server import serialize
from integration.node.service import Context
from integration.node.services.dra import cdi, metadata
from integration.node.state.topic import version_of, wait_any
from integration.node.values.claims import Claim, Health, Reference
from integration.timeouts import PATIENCE
from integration.watcher import first_of

__all__ = [
    "TO_FINISH", "ActiveDriver", "ClaimApi", "DriverApi", "DriverEnded", "Relay", "RelayRefused",
    "prepared_response",
]  # fmt: skip

TO_FINISH: Final = 5.0
"""Seconds that work on claims may take once the agent is stopping."""

_TO_ANSWER: Final = 40.0 * PATIENCE
_REPEAT_HEALTH: Final = 10.0
_HEALTH_VALID: Final = 30
_LONGEST_MESSAGE: Final = 1024


class ClaimApi(Protocol):
    """Prepares and unprepares claims (:class:`.transaction.ClaimTransactions`)."""

    async def prepare(self, reference: Reference) -> Claim:
        """Make a claim's devices ready for its pods."""

    async def unprepare(self, reference: Reference) -> None:
        """Undo what was prepared; nothing if nothing was."""


class DriverApi(Protocol):
    """What the RPCs need of a driver (:class:`.driver.Driver`)."""

    @property
    def transactions(self) -> ClaimApi:
        """The driver's claims."""

    def health(self) -> Iterable[Health]:
        """Return the health of each device."""


class DriverEnded(Exception):
    """The driver ended before the work on a claim was complete."""


@dataclass(slots=True)
class _Work:
    """Work on one claim."""

    reference: Reference
    # the claim, or None and the reason why there is none; None until the work is done
    result: tuple[Claim | None, str] | None = None
    done: anyio.Event = field(default_factory=anyio.Event)

    @property
    def title(self) -> str:
        """The claim, for messages."""
        return f"{self.reference.namespace}/{self.reference.name}"


class ActiveDriver:
    """Answers RPCs while the driver of this agent is active.

    Args:
        tasks: the task group in which the work on claims runs.
    """

    def __init__(self, context: Context, driver: DriverApi, tasks: anyio.abc.TaskGroup) -> None:
        self._context = context
        self._driver = driver
        self._tasks = tasks
        self._ended = anyio.Event()
        self._under_way: set[anyio.CancelScope] = set()

    def end(self) -> None:
        """Set a deadline for the work in progress."""
        self._ended.set()
        for scope in self._under_way:
            scope.deadline = min(scope.deadline, anyio.current_time() + TO_FINISH)

    async def prepare(
        self, request: pb.NodePrepareResourcesRequest, *, knows_shares: bool
    ) -> pb.NodePrepareResourcesResponse:
        """Answer NodePrepareResources.

        Args:
            knows_shares: whether this version of the API has shares.

        Raises:
            DriverEnded: the driver ended before the answer was ready.
        """
        response = pb.NodePrepareResourcesResponse()
        driver = self._context.options.dra_driver
        prepare = self._driver.transactions.prepare
        for uid, claim, error in await self._run_all("prepare", prepare, request.claims):
            answer = pb.NodePrepareResourceResponse(error=error)
            if claim is not None:
                answer = prepared_response(claim, driver, knows_shares=knows_shares)
            response.claims[uid].CopyFrom(answer)
        return response

    async def unprepare(
        self, request: pb.NodeUnprepareResourcesRequest
    ) -> pb.NodeUnprepareResourcesResponse:
        """Answer NodeUnprepareResources.

        Raises:
            DriverEnded: the driver ended before the answer was ready.
        """
        response = pb.NodeUnprepareResourcesResponse()
        unprepare = self._driver.transactions.unprepare
        for uid, _, error in await self._run_all("unprepare", unprepare, request.claims):
            response.claims[uid].error = error
        return response

    async def watch(self) -> AsyncGenerator[health_pb.NodeWatchResourcesResponse, None]:
        """Yield the messages of NodeWatchResources."""
        health = self._context.state.dra_health
        while not self._ended.is_set():
            version = version_of(health)
            yield _health_response(self._driver.health())
            change = partial(wait_any, health, since=version, timeout=_REPEAT_HEALTH)
            await first_of(change, self._ended.wait)

    async def _run_all(
        self,
        verb: str,
        run: Callable[[Reference], Awaitable[Claim | None]],
        claims: Iterable[pb.Claim],
    ) -> list[tuple[str, Claim | None, str]]:
        """Work on the claims of a call; return each UID with its result and error.

        Args:
            verb: the verb for messages.
        """
        works = [_Work(Reference(each.namespace, each.uid, each.name)) for each in claims]
        for work in works:
            self._tasks.start_soon(self._run, verb, run, work)
        with anyio.move_on_after(_TO_ANSWER):
            for work in works:
                await work.done.wait()
        found = []
        for work in works:
            if not work.done.is_set():
                late = ClaimUnfinished(
                    f"to {verb} the claim {work.title}",
                    found=f"it is not complete after {_TO_ANSWER:g} s, and continues",
                )
                self._context.say("warning", str(late))
                work.result = None, one_line(str(late))
            if work.result is None:
                raise DriverEnded
            found.append((work.reference.uid, *work.result))
        return found

    async def _run(
        self, verb: str, run: Callable[[Reference], Awaitable[Claim | None]], work: _Work
    ) -> None:
        reference = work.reference
        try:
            with self._survives_end():
                work.result = await run(reference), ""
        except NvshimError as error:
            work.result = None, one_line(str(error))
            self._context.say("warning", str(error), claim=work.title)
        except Exception as error:  # noqa: BLE001 - a bug with one claim must not end the server
            failed = DraFailed(
                f"to {verb} the claim {work.title}", found=f"{type(error).__name__}: {error}"
            )
            work.result = None, one_line(str(failed))
            self._context.say("error", str(failed), trace=traceback.format_exc())
        else:
            if work.result is not None:
                self._context.say("info", f"{verb}d", claim=work.title, uid=reference.uid)
        finally:
            work.done.set()

    @contextmanager
    def _survives_end(self) -> Iterator[None]:
        """Let work continue for some seconds after the driver ended."""
        deadline = anyio.current_time() + TO_FINISH if self._ended.is_set() else math.inf
        with anyio.CancelScope(deadline=deadline, shield=True) as scope:
            self._under_way.add(scope)
            try:
                yield
            finally:
                self._under_way.discard(scope)


def _health_response(devices: Iterable[Health]) -> health_pb.NodeWatchResourcesResponse:
    now = int(time.time())
    response = health_pb.NodeWatchResourcesResponse()
    for each in devices:
        response.devices.add(
            device=health_pb.DeviceIdentifier(pool_name=each.pool, device_name=each.name),
            health=health_pb.HEALTHY if each.is_healthy else health_pb.UNHEALTHY,
            last_updated_time=now,
            health_check_timeout_seconds=_HEALTH_VALID,
            message=each.message[:_LONGEST_MESSAGE],
        )
    return response


def prepared_response(
    claim: Claim, driver: str, *, knows_shares: bool = True
) -> pb.NodePrepareResourceResponse:
    """Return the kubelet's answer for a prepared claim.

    Args:
        driver: the name of the driver.
        knows_shares: whether this version of the API has shares.
    """
    response = pb.NodePrepareResourceResponse()
    described = {*metadata.requests_of(claim)} if claim.has_metadata else set[str]()
    for device in claim.devices:
        names = [cdi.name_of(driver, claim.uid, device)]
        if device.request in described:  # with the first device of the request
            described.remove(device.request)
            names.append(metadata.id_of(driver, claim.uid, device.request))
        response.devices.add(
            request_names=[device.request],
            pool_name=device.pool,
            device_name=device.device,
            cdi_device_ids=names,
            share_id=device.share if device.share and knows_shares else None,
        )
    return response


# The status of a call whose server ended.
_NO_ANSWER: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
# Channels that share a connection also share the pauses after its failures.
_OWN: Final = (("grpc.use_local_subchannel_pool", 1),)


class RelayRefused(Exception):
    """The active instance answered with an error.

    Attributes:
        code: the gRPC status.
        details: its message.
    """

    def __init__(self, error: Any) -> None:
        self.code, self.details = error.code(), error.details()
        super().__init__(self.details)


class Relay:
    """Calls the active instance.

    Args:
        path: the socket that the active instance serves.
    """

    def __init__(self, path: str) -> None:
        self._target = f"unix:{path}"

    async def call(self, method: str, request: Any, kind: Any, timeout: float | None) -> Any:
        """Relay a call.

        Args:
            kind: the type of the response.
            timeout: the time limit in seconds; None for no limit.

        Returns:
            The response; None if no instance is active now.

        Raises:
            RelayRefused: the instance answered with an error.
        """
        async with grpc.aio.insecure_channel(self._target, options=_OWN) as channel:
            ask = channel.unary_unary(
                method, request_serializer=serialize, response_deserializer=kind.FromString
            )
            try:
                return await answer_of(ask(request, timeout=timeout))
            except grpc.RpcError as error:
                if error.code() not in _NO_ANSWER:
                    raise RelayRefused(error) from error
                return None

    async def stream(self, method: str, request: Any, kind: Any) -> AsyncGenerator[Any, None]:
        """Relay a stream until the instance that sends it exits.

        Raises:
            RelayRefused: the instance answered with an error.
        """
        async with grpc.aio.insecure_channel(self._target, options=_OWN) as channel:
            ask = channel.unary_stream(
                method, request_serializer=serialize, response_deserializer=kind.FromString
            )
            try:
                async for message in ask(request):
                    yield message
            except grpc.RpcError as error:
                if error.code() not in _NO_ANSWER:
                    raise RelayRefused(error) from error
